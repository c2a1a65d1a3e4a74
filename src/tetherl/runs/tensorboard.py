"""Metrics as TensorBoard event files, written without TensorBoard.

An event file is a sequence of records: length (8 bytes), its checksum, an `Event` message in protobuf, its checksum
(tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto). Four kinds of field are all that scalars
need, so that training needs no further package; `tensorboard --logdir runs` shows them.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tetherl.errors import RunError


class TensorBoardLog:
    """`directory` with one event file per process that trained the run; x-axis: env steps.

    Every metric that is a finite number becomes a scalar of the same name.
    """

    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        self.directory = Path(directory)
        self.read_only = read_only
        self._file: BinaryIO | None = None

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of one iteration; `env_steps` is their place on the x-axis. RunError when it fails."""
        values = b"".join(
            _message(1, _message(1, key.encode()) + b"\x15" + struct.pack("<f", value))
            for key, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
        self._write(_step(int(metrics.get("env_steps") or 0)) + _message(5, values))

    def restart(self, env_steps: int) -> None:
        """What was written beyond `env_steps` is void: the run goes on from there. Nothing when nothing was written."""
        if any(self.directory.glob("*tfevents*")):
            self._write(_step(env_steps + 1) + _message(7, b"\x08\x01"))  # a session starts

    def close(self) -> None:
        """Closing twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, fields: bytes) -> None:
        if self.read_only:
            raise RunError(f"{self.directory} was opened for reading only; open the run to write to it")
        try:
            file = self._open()
            file.write(_record(_event(fields)))
            file.flush()
        except OSError as error:
            raise RunError(
                f"{self.directory}: metrics could not be written: {error.strerror or error}. "
                "Check the free space and the permissions of the run directory."
            ) from error

    def _open(self) -> BinaryIO:
        if self._file is None:
            self.directory.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{int(time.time()):010d}.{os.getpid()}"
            self._file = open(self.directory / name, "ab")  # noqa: SIM115 - stays open
            if self._file.tell() == 0:
                self._file.write(_record(_event(_message(3, b"brain.Event:2"))))
        return self._file


def _event(fields: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time.time()) + fields


def _step(step: int) -> bytes:
    return b"\x10" + _varint(step)


def _message(number: int, data: bytes) -> bytes:
    """A protobuf field that holds bytes, text or another message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted as the format wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]
