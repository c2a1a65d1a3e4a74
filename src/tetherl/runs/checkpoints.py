"""The checkpoints of a run: save, find, load, and keep only as many as wanted."""

from __future__ import annotations

import logging
import math
import operator
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tetherl.errors import CheckpointError, RunError
from tetherl.runs.checkpoint_format import (
    Checkpoint,
    encode_arrays,
    encode_state,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from tetherl.runs.files import sync_directory

_log = logging.getLogger("tetherl.runs")

_FINAL = re.compile(r"\d{6,}")
# Never complete checkpoints, except `.replaced-…` while its successor is missing.
_HIDDEN = re.compile(r"\.(writing|replaced|deleted)-(\d{6,})-\d+")
_RELISTS = 10


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint as its manifest describes it; its content is checked only when it is loaded."""

    iteration: int
    score: float | None
    created: str
    path: Path


class CheckpointStore:
    """The directory `checkpoints/` of a run, with one subdirectory per checkpoint: 000012, 000024, …

    A checkpoint is written aside and renamed when it is whole, so that a crash at any instant leaves every
    earlier one loadable. After each save only the newest `keep` (0: all) and the `keep_best` best by score
    stay; `mode` says whether a "max" or "min" score is best. Opening a store for writing removes what crashed
    writers left behind; there must be one writer at a time (the run's lock sees to it). Readers need no lock.

    `on_warning` receives a text for each damaged checkpoint that is passed over and for what could not be
    deleted; by default it goes to the logger "tetherl.runs".
    """

    def __init__(
        self,
        path: Path | str,
        *,
        keep: int = 3,
        keep_best: int = 1,
        mode: Literal["max", "min"] = "max",
        read_only: bool = False,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 0 or keep_best < 0 or mode not in ("max", "min"):
            raise RunError(
                f"keep={keep}, keep_best={keep_best}, mode={mode!r}: expected counts of 0 or more, and 'max' or 'min'"
            )
        self.path = Path(path)
        self.keep = keep
        self.keep_best = keep_best
        self.mode = mode
        self.read_only = read_only
        self._warn = on_warning or _log.warning
        self._mutex = threading.RLock()
        self._damaged: set[int] = set()  # iterations whose content was found wrong when loading
        if not read_only:
            self._clean()

    @property
    def empty(self) -> bool:
        """True when there is no checkpoint at all, not even a damaged one: a run may start from scratch."""
        return not self._directories()

    def save(
        self,
        iteration: int,
        arrays: Mapping[str, np.ndarray],
        state: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> Path:
        """Write the checkpoint of `iteration`, replacing one of that number; delete those no longer kept.

        arrays: any shape and numeric or bool dtype; state: strict JSON (str keys, finite numbers, lists,
        None). A NaN or infinite score counts as none: such a checkpoint is never the best. CheckpointError
        when something cannot be stored (names the key) or the disk refuses (full, read-only): then nothing
        partial is left, and the earlier checkpoints are as they were.
        """
        iteration = operator.index(iteration)
        if iteration < 0:
            raise CheckpointError(f"iteration {iteration}: expected 0 or more")
        array_bytes, state_bytes = encode_arrays(arrays), encode_state(state)
        score = float(score) if score is not None and math.isfinite(score) else None
        final = self.path / f"{iteration:06d}"
        with self._mutex:
            self._check_writable()
            aside = self._hidden("writing", iteration)
            try:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
                write_checkpoint(aside, iteration=iteration, arrays=array_bytes, state=state_bytes, score=score)
                self._put_in_place(aside, final, iteration)
            except OSError as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise CheckpointError(
                    f"the checkpoint of iteration {iteration} could not be saved in {self.path}: "
                    f"{error.strerror or error} ({self._last_good()}). Check the free space "
                    f"({(len(array_bytes) + len(state_bytes)) / 1e6:.1f} MB are needed) and the permissions."
                ) from error
            except BaseException:  # Ctrl-C in the middle
                shutil.rmtree(aside, ignore_errors=True)
                raise
            self._damaged.discard(iteration)
            self._retain(iteration)
        return final

    def load(self, which: Literal["latest", "best"] | int | str | Path = "latest") -> Checkpoint:
        """Load a checkpoint after checking its hashes.

        "latest" and "best" pass over damaged ones, each with a warning, and take the next in order; a number
        or a path means exactly that one. CheckpointError when it is damaged or missing, or when none is
        usable (gives the reason for each).
        """
        if isinstance(which, int):
            return self._load_number(which)
        if isinstance(which, str) and which.isdecimal():
            return self._load_number(int(which))
        if which in ("latest", "best"):
            return self._load_first(best=which == "best")
        path = Path(which)
        if not path.is_dir():
            raise CheckpointError(
                f"there is no checkpoint {path}: give 'latest', 'best', an iteration or its directory"
            )
        return _load_directory(path)

    def list(self) -> Sequence[CheckpointInfo]:
        """The complete checkpoints, oldest first. Damaged ones are left out; `load` warns about them."""
        infos = []
        for iteration, path in self._directories().items():
            if iteration in self._damaged:
                continue
            try:
                manifest = read_manifest(path, iteration)
            except CheckpointError:
                continue
            infos.append(CheckpointInfo(iteration, manifest.score, manifest.created, path))
        return infos

    def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint."""
        infos = self.list()
        return infos[-1] if infos else None

    def best(self) -> CheckpointInfo | None:
        """The complete checkpoint with the best score, the newer of equals; None when none has a score."""
        ranked = self._ranked(self.list())
        return ranked[0] if ranked else None

    def truncate_after(self, iteration: int) -> Sequence[int]:
        """Delete the checkpoints after `iteration`, damaged ones too; returns their numbers.

        For a run that goes on from an older checkpoint: what came after is no longer its past, and must not
        be "latest" or "best" again.
        """
        with self._mutex:
            self._check_writable()
            later = {number: path for number, path in self._directories().items() if number > iteration}
            for number, path in later.items():
                self._delete(number, path)
        return tuple(later)

    # -- finding and loading

    def _directories(self) -> dict[int, Path]:
        """Iteration -> directory, complete or not, oldest first.

        A `.replaced-` directory counts while its successor is missing: the writer died between two renames.
        """
        found: dict[int, Path] = {}
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return found
        except OSError as error:
            raise RunError(f"{self.path} cannot be listed: {error.strerror or error}") from error
        for name in sorted(names):  # dots sort before digits, so the proper name wins
            hidden = _HIDDEN.fullmatch(name)
            if hidden and hidden[1] == "replaced":
                found[int(hidden[2])] = self.path / name
            elif _FINAL.fullmatch(name):
                found[int(name)] = self.path / name
        return dict(sorted(found.items()))

    def _load_number(self, iteration: int) -> Checkpoint:
        path = self._directories().get(iteration)
        if path is None:
            have = ", ".join(str(info.iteration) for info in self.list()) or "none"
            raise CheckpointError(f"there is no checkpoint {iteration} in {self.path}; there are: {have}")
        return _load_directory(path, iteration)

    def _load_first(self, *, best: bool) -> Checkpoint:
        warnings: dict[int, str] = {}
        for _ in range(_RELISTS):
            directories = self._directories()
            if best:
                # Only complete ones have a score; the others are named all the same.
                self._note_incomplete(directories, warnings)
                order = [info.iteration for info in self._ranked(self.list())]
            else:
                order = sorted(directories, reverse=True)
            vanished = False
            for iteration in order:
                if iteration in warnings:
                    continue
                path = directories.get(iteration, self.path / f"{iteration:06d}")
                try:
                    found = _load_directory(path, iteration)
                except CheckpointError as error:
                    if not path.exists():  # the training process has just replaced it by a newer one
                        vanished = True
                        break
                    self._pass_over(iteration, str(error), warnings)
                    continue
                return replace(found, warnings=tuple(warnings.values()))
            if not vanished:
                break
        what = "checkpoint with a score" if best else "checkpoint"
        if not warnings:
            hint = " Load 'latest' instead." if best and not self.empty else ""
            raise CheckpointError(f"there is no {what} in {self.path}.{hint}")
        raise CheckpointError(f"no {what} in {self.path} can be used: " + "; ".join(warnings.values()))

    def _note_incomplete(self, directories: Mapping[int, Path], warnings: dict[int, str]) -> None:
        for iteration, path in directories.items():
            if iteration not in warnings:
                try:
                    read_manifest(path, iteration)
                except CheckpointError as error:
                    if path.exists():
                        self._pass_over(iteration, f"checkpoint {path}: {error}", warnings)

    def _pass_over(self, iteration: int, reason: str, warnings: dict[int, str]) -> None:
        self._damaged.add(iteration)
        warnings[iteration] = reason
        self._warn(f"{reason}; passed over")

    def _ranked(self, infos: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
        """Those with a score, best first, the newer of equals first."""
        sign = 1 if self.mode == "max" else -1
        scored = [(sign * info.score, info.iteration, info) for info in infos if info.score is not None]
        return [info for *_, info in sorted(scored, key=lambda row: row[:2], reverse=True)]

    # -- changing the directory

    def _hidden(self, what: str, iteration: int) -> Path:
        return self.path / f".{what}-{iteration:06d}-{os.getpid()}"

    def _put_in_place(self, aside: Path, final: Path, iteration: int) -> None:
        replaced = None
        if final.exists():
            replaced = self._hidden("replaced", iteration)
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        try:
            os.rename(aside, final)
        except OSError:
            if replaced is not None:
                os.rename(replaced, final)
            raise
        sync_directory(self.path)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _retain(self, saved: int) -> None:
        """Delete what is no longer kept. The save has succeeded, so nothing here raises."""
        infos = self.list()
        if self.keep == 0 or not infos:
            return
        newest = [info.iteration for info in infos[-self.keep :]]
        wanted = {saved, *newest, *(info.iteration for info in self._ranked(infos)[: self.keep_best])}
        complete = {info.iteration for info in infos}
        for iteration, path in self._directories().items():
            # Damaged ones count for nothing; they stay to be looked at until older than all the newest.
            if iteration not in wanted and (iteration in complete or iteration < newest[0]):
                self._delete(iteration, path)

    def _delete(self, iteration: int, path: Path) -> None:
        """Renamed first, so that a half-deleted checkpoint is never seen."""
        deleted = self._hidden("deleted", iteration)
        try:
            if deleted.exists():
                shutil.rmtree(deleted)
            os.rename(path, deleted)
            shutil.rmtree(deleted)
        except OSError as error:
            self._warn(f"checkpoint {path} could not be deleted: {error.strerror or error}")

    def _clean(self) -> None:
        """Remove what crashed writers left behind."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = os.listdir(self.path)
        except OSError as error:
            raise RunError(f"{self.path} cannot be opened: {error.strerror or error}") from error
        for name in names:
            hidden = _HIDDEN.fullmatch(name)
            if hidden is None:
                continue
            left, final = self.path / name, self.path / f"{int(hidden[2]):06d}"
            try:
                if hidden[1] == "replaced" and not final.exists():
                    os.rename(left, final)
                else:
                    shutil.rmtree(left)
            except OSError as error:
                self._warn(f"{left} of a crashed writer could not be removed: {error.strerror or error}")

    def _check_writable(self) -> None:
        if self.read_only:
            raise RunError(f"{self.path} was opened for reading only; open the run to change its checkpoints")

    def _last_good(self) -> str:
        latest = self.latest()
        return f"the last good one is {latest.path}" if latest else "there is no earlier one"


def _load_directory(path: Path, iteration: int | None = None) -> Checkpoint:
    try:
        return read_checkpoint(path, iteration)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
