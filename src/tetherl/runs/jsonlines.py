"""A file of one JSON object per line that is appended to for days and must survive a killed writer."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tetherl.errors import RunError
from tetherl.runs.files import replace_file

_log = logging.getLogger("tetherl.runs")


class JsonLines:
    """Appends dicts to `path`, one JSON object per line; thread-safe; one writing process at a time.

    Each line reaches the operating system with one write before `append` returns, so it survives the death of
    the process. A writer that is killed inside that write leaves a torn last line: `read` ignores it and the
    next `append` removes it. A `read_only` log refuses to append.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self._mutex = threading.Lock()
        self._fd: int | None = None
        self._closed = False

    def append_line(self, record: dict[str, Any]) -> None:
        """Append `record`, which must hold nothing but JSON values. RunError when it cannot be written."""
        data = json.dumps(record, allow_nan=False).encode() + b"\n"
        with self._mutex:
            self._check_writable()
            start = None
            try:
                if self._fd is None:
                    self._fd = self._open_to_append()
                start = os.fstat(self._fd).st_size
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError as error:
                if self._fd is not None and start is not None:
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._fd, start)  # leave no half a line behind
                raise RunError(
                    f"{self.path}: a line could not be appended: {error.strerror or error}. "
                    "Check the free space and the permissions of the run directory."
                ) from error

    def read(self) -> list[dict[str, Any]]:
        """All records, oldest first; [] when there is no file yet. Unreadable lines are skipped, logged."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from error
        records = []
        lines = data.split(b"\n")
        for number, line in enumerate(lines, start=1):
            record = _parse(line)
            if record is not None:
                records.append(record)
            elif line.strip() and number < len(lines):  # the last may be in the middle of being written
                _log.warning("%s: line %d is not a JSON object and is skipped", self.path, number)
        return records

    def keep_if(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        """Rewrite the file in one step with the records for which `wanted` is true; returns how many went."""
        with self._mutex:
            self._check_writable()
            records = self.read()
            kept = [record for record in records if wanted(record)]
            if len(kept) < len(records):
                self._close_file()  # the descriptor would go on writing to the replaced file
                data = "".join(json.dumps(to_json(record, "line")) + "\n" for record in kept).encode()
                try:
                    replace_file(self.path, data)
                except OSError as error:
                    raise RunError(
                        f"{self.path} could not be rewritten: {error.strerror or error}. It is unchanged."
                    ) from error
            return len(records) - len(kept)

    def close(self) -> None:
        """No more appends; reading still works. Closing twice is fine."""
        with self._mutex:
            self._closed = True
            self._close_file()

    def _check_writable(self) -> None:
        if self.read_only:
            raise RunError(f"{self.path} was opened for reading only; open the run to write to it")
        if self._closed:
            raise RunError(f"{self.path} is closed; nothing can be written to it any more")

    def _open_to_append(self) -> int:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        try:
            self._mend_end(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _mend_end(self, fd: int) -> None:
        """Finish or remove a last line that its writer could not finish."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole == len(data):
            return
        if _parse(data[whole:]) is not None:
            os.write(fd, b"\n")
        else:
            os.ftruncate(fd, whole)
            _log.warning("%s: removed a torn last line of %d bytes", self.path, len(data) - whole)

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def to_json(value: Any, where: str, *, other: Callable[[Any], Any] | None = None) -> Any:
    """`value` as plain JSON values: NaN and infinities become None, numpy scalars and arrays become plain.

    Anything else goes through `other`; without it a RunError names the place, which is `where` and the keys
    below.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item, f"{where}[{key!r}]", other=other) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item, f"{where}[{index}]", other=other) for index, item in enumerate(value)]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, tensors
        return to_json(value.tolist(), where, other=other)
    if other is not None:
        return other(value)
    raise RunError(f"{where} is a {type(value).__name__}, which JSON cannot hold: give a number, text, list or dict")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
