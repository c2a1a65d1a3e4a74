"""What a checkpoint of a run holds, and how a run goes on from one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tetherl.algorithms.ppo import PPOLearner
from tetherl.config import RunConfig
from tetherl.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from tetherl.algorithm import Algorithm

_HARMLESS = ("resume", "name", "runs_dir", "stop", "checkpoint", "machine", "external.port", "external.worker_port")
"""Settings that may differ between two starts of a run without a word."""


@dataclass(frozen=True)
class Resumed:
    """From where a run goes on. changed: settings that are not those of the checkpoint, as "key: old → new"."""

    path: Path
    iteration: int
    iterations_lost: int
    changed: tuple[str, ...]
    warnings: tuple[str, ...]


def check_resume(config: RunConfig) -> None:
    """Refuse what `resume` forbids, before anything is made on disk. RunError."""
    assert config.name is not None
    path = Path(config.runs_dir) / config.name
    if config.resume == "never" and path.exists():
        raise RunError(
            f"run {config.name!r} exists already in {path} and resume is 'never'; choose another name, or resume=auto "
            "to go on with it"
        )
    if config.resume == "must" and not any((path / "checkpoints").glob("*/manifest.json")):
        raise RunError(
            f"run {config.name!r} has no checkpoint to resume in {path} and resume is 'must'; check name and runs_dir, "
            "or use resume=auto"
        )


def state_of(algorithm: Algorithm) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, JSON-able state) of a run between two iterations."""
    arrays, learner = algorithm.learner.state()
    state = {
        "iteration": algorithm.iteration,
        "version": algorithm.version,
        "seconds": algorithm.seconds,
        "learner": learner,
        "books": algorithm.queue.snapshot()["state"],
        "tracker": algorithm.tracker.state(),
        "metrics": algorithm.metrics,
        "config": algorithm.config.to_dict(),
    }
    return arrays, state


def resume(algorithm: Algorithm) -> Resumed | None:
    """Go on from the latest complete checkpoint, if there is one. CheckpointError when it does not fit."""
    run_dir = algorithm.run_dir
    if run_dir.checkpoints.empty:
        run_dir.truncate_after(0, 0)
        return None
    reached = max((line.get("iteration", 0) for line in run_dir.metrics.read()), default=0)
    checkpoint = run_dir.checkpoints.load("latest")
    state = checkpoint.state
    changed = _changes(state["config"], algorithm.config.to_dict())
    assert isinstance(algorithm.learner, PPOLearner)
    try:
        algorithm.learner.load_state(checkpoint.arrays, state["learner"])
    except CheckpointError as error:
        difference = "; ".join(changed) or "none"
        raise CheckpointError(
            f"checkpoint {checkpoint.path} does not fit this configuration: {error}\n"
            f"Settings changed since then: {difference}. Use the old settings, or another name for a new run."
        ) from error
    algorithm.iteration, algorithm.version = int(state["iteration"]), int(state["version"])
    algorithm.past_seconds = float(state["seconds"])
    algorithm.queue.ledger.restore(state["books"])
    algorithm.tracker.restore(state["tracker"])
    algorithm.metrics = dict(state["metrics"])
    run_dir.truncate_after(algorithm.iteration, algorithm.queue.received)
    run_dir.checkpoints.truncate_after(algorithm.iteration)
    lost = max(0, reached - algorithm.iteration)
    return Resumed(checkpoint.path, algorithm.iteration, lost, tuple(changed), tuple(checkpoint.warnings))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    old, new = _flat(before), _flat(now)
    keys = [k for k in sorted({*old, *new}) if not k.startswith(_HARMLESS) and old.get(k) != new.get(k)]
    return [f"{key}: {old.get(key)} → {new.get(key)}" for key in keys]


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
