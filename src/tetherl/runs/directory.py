"""A run directory: one folder per run with its configuration, metrics, events and checkpoints."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tetherl.errors import MissingExtraError, RunError
from tetherl.runs.checkpoints import CheckpointStore
from tetherl.runs.events import EventLog
from tetherl.runs.files import replace_file
from tetherl.runs.lock import RunLock
from tetherl.runs.metrics import MetricsLog
from tetherl.runs.tensorboard import TensorBoardLog

_log = logging.getLogger("tetherl.runs")

_CONFIG = "config.yaml"
_MARKS = (_CONFIG, "metrics.jsonl", "events.jsonl", "checkpoints")


class RunDirectory:
    """`ROOT/NAME` with config.yaml, metrics.jsonl, events.jsonl, checkpoints/, tensorboard/ and lock.

    Made by `open` (to train: creates, locks) or by `read` and `find` (everything else: no lock, nothing is
    written). `existed` is true when the run had been started before.
    """

    path: Path
    name: str
    existed: bool
    metrics: MetricsLog
    events: EventLog
    checkpoints: CheckpointStore
    tensorboard: TensorBoardLog

    def __init__(
        self,
        path: Path,
        *,
        lock: RunLock | None,
        keep: int = 3,
        keep_best: int = 1,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        read_only = lock is None
        path = path.absolute()  # a program that changes its working directory must not move the run
        self.path = path
        self.name = path.name
        self.existed = _is_run(path)
        self._lock = lock
        self._read_only = read_only
        self.metrics = MetricsLog(path / "metrics.jsonl", read_only=read_only)
        self.events = EventLog(path / "events.jsonl", read_only=read_only)
        self.tensorboard = TensorBoardLog(path / "tensorboard", read_only=read_only)
        self.checkpoints = CheckpointStore(
            path / "checkpoints",
            keep=keep,
            keep_best=keep_best,
            mode=mode,
            read_only=read_only,
            on_warning=None if read_only else self._on_warning,
        )

    @classmethod
    def open(
        cls,
        root: Path | str,
        name: str,
        *,
        keep: int = 3,
        keep_best: int = 1,
        mode: Literal["max", "min"] = "max",
    ) -> RunDirectory:
        """Create the run `name` under `root`, or open it again; locked until closed.

        RunError when the name is no plain folder name, another process has the run (names it), or the folder
        cannot be made. Retention (`keep`, `keep_best`, `mode`) as in CheckpointStore.
        """
        check_name(name)
        path = Path(root) / name
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"the run directory {path} cannot be made: {error.strerror or error}. "
                "Choose another runs_dir, or another name for the run."
            ) from error
        lock = RunLock(path / "lock")
        try:
            return cls(path, lock=lock, keep=keep, keep_best=keep_best, mode=mode)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def read(cls, root: Path | str, name: str, *, mode: Literal["max", "min"] = "max") -> RunDirectory:
        """The run `name` under `root`, to look at only, also while it trains. RunError when there is none."""
        check_name(name)
        path = Path(root) / name
        if not _is_run(path):
            raise RunError(_not_found(name, Path(root)))
        return cls(path, lock=None, mode=mode)

    @classmethod
    def find(cls, run: Path | str, root: Path | str = "runs", *, mode: Literal["max", "min"] = "max") -> RunDirectory:
        """As `read`, for what a user types: the name of a run under `root`, or a run directory's path."""
        for path in (Path(root) / run, Path(run)):
            if _is_run(path):
                return cls(path.resolve(), lock=None, mode=mode)
        raise RunError(_not_found(str(run), Path(root)))

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.yaml in one step. RunError for what is no plain value (number, text, list, dict)."""
        if self._read_only:
            raise RunError(f"{self.path} was opened for reading only; open the run to write its configuration")
        yaml = _yaml()
        try:
            text = yaml.dump(dict(config), Dumper=_plain_dumper(yaml), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as error:
            raise RunError(
                f"the configuration of run {self.name!r} holds something that is no plain value: {error}"
            ) from error
        try:
            replace_file(self.path / _CONFIG, text.encode())
        except OSError as error:
            raise RunError(f"{self.path / _CONFIG} could not be written: {error.strerror or error}") from error

    def read_config(self) -> dict[str, Any]:
        """config.yaml as plain values; tags that would build objects are refused. RunError if unusable."""
        yaml = _yaml()
        path = self.path / _CONFIG
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{path} is missing: the run was never started, or the file was deleted") from None
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RunError(f"{path} is not plain YAML: {error}") from error
        if not isinstance(config, dict):
            raise RunError(f"{path} holds a {type(config).__name__}, expected settings (key: value)")
        return config

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one iteration to metrics.jsonl and to the TensorBoard files. RunError when it fails."""
        self.metrics.append(metrics)
        self.tensorboard.append(metrics)

    def truncate_after(self, iteration: int, env_steps: int) -> None:
        """Drop the metrics of what comes after `iteration`, which ended at `env_steps`: it will be played again."""
        self.metrics.truncate_after(iteration)
        self.tensorboard.restart(env_steps)

    def close(self) -> None:
        """Close the logs and let others have the run. Closing twice is fine."""
        self.metrics.close()
        self.events.close()
        self.tensorboard.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_warning(self, message: str) -> None:
        _log.warning(message)
        with contextlib.suppress(RunError):  # a full disk: the warning is in the log of the process at least
            self.events.append("warning", message=message)


@dataclass(frozen=True)
class RunSummary:
    """One row of the list of runs; None where the run has no such number yet."""

    name: str
    path: Path
    iterations: int
    env_steps: int
    episode_return_mean: float | None  # of the last iteration that had one
    best_return: float | None  # highest episode_return_mean of all iterations
    last_checkpoint: int | None


def list_runs(root: Path | str) -> list[RunSummary]:
    """A summary of each run under `root`, by name; [] when the folder does not exist."""
    return [_summary(Path(root) / name) for name in _run_names(Path(root))]


def check_name(name: str) -> None:
    """RunError unless `name` can be the name of one folder, on every system."""
    bad = sorted({c for c in name if c in '/\\:*?"<>|' or ord(c) < 32})
    if bad:
        problem = f"it contains {bad[0]!r}"
    elif not name.strip():
        problem = "it is empty"
    elif name.startswith(".") or name.endswith((".", " ")):
        problem = "it starts with a dot or ends with a dot or space"
    elif len(name.encode()) > 200:
        problem = f"it has {len(name.encode())} bytes, at most 200 are possible"
    else:
        return
    raise RunError(
        f"{name!r} cannot be the name of a run: {problem}. Use letters, digits, '-', '_', '.'; "
        "the folder around it is the setting runs_dir."
    )


def _is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in _MARKS)


def _run_names(root: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(root) if _is_run(root / name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"{root} cannot be listed: {error.strerror or error}") from error


def _not_found(run: str, root: Path) -> str:
    names = _run_names(root)
    message = f"there is no run {run!r} in {root.absolute()}"
    if not names:
        return f"{message}, nor any other run: check runs_dir, or give the path of the run directory"
    near = difflib.get_close_matches(run, names, n=3) or names[-5:]
    return f"{message}; there is {', '.join(repr(name) for name in near)}"


def _summary(path: Path) -> RunSummary:
    with RunDirectory(path, lock=None) as run:
        lines = run.metrics.read()
        latest = run.checkpoints.latest()
    last = lines[-1] if lines else {}
    returns = [line["episode_return_mean"] for line in lines if line.get("episode_return_mean") is not None]
    return RunSummary(
        name=path.name,
        path=path,
        iterations=last.get("iteration", 0),
        env_steps=last.get("env_steps", 0),
        episode_return_mean=returns[-1] if returns else None,
        best_return=max(returns, default=None),
        last_checkpoint=latest.iteration if latest else None,
    )


def _yaml() -> ModuleType:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("reading and writing config.yaml", "train") from None
    return yaml


def _plain_dumper(yaml: ModuleType) -> type:
    """A safe dumper that writes a list used twice in full both times, not as an anchor and an alias."""

    class PlainDumper(yaml.SafeDumper):  # type: ignore[name-defined]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return PlainDumper
