"""What the algorithm keeps about episodes and clients for its metrics."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from tetherl.data.fragment import DROP_REASONS, Sample

if TYPE_CHECKING:
    from tetherl.algorithm import Algorithm

WINDOW = 100
"""Training curves are the mean of the last 100 completed episodes, never of "the episodes of this iteration"."""


class Tracker:
    """Thread-safe: samples arrive in the engine's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.episodes = 0
        self._info: dict[int, dict[str, float]] = {}
        self._evaluated: list[float] = []  # returns of evaluating clients, not reported yet
        self.peak_clients: dict[int, int] = {}  # most clients at once, by worker

    def add(self, sample: Sample) -> None:
        """Take over a worker's finished episodes, numbers and events."""
        with self._lock:
            for episode in sample.episodes:
                self._window.append((episode.episode_return, episode.length))
                self.episodes += 1
            if sample.info:
                self._info[sample.worker] = sample.info
                clients = int(sample.info.get("clients", 0))
                self.peak_clients[sample.worker] = max(clients, self.peak_clients.get(sample.worker, 0))
            self._evaluated += [e["episode_return"] for e in sample.events if e["kind"] == "evaluation_episode"]

    def evaluated(self) -> dict[str, Any]:
        """What clients with purpose `evaluate` have played since the last call."""
        with self._lock:
            returns, self._evaluated = self._evaluated, []
        if not returns:
            return {}
        return {
            "evaluation/episode_return_mean": sum(returns) / len(returns),
            "evaluation/episode_return_min": min(returns),
            "evaluation/episode_return_max": max(returns),
            "evaluation/episodes": len(returns),
        }

    @property
    def full(self) -> bool:
        """Whether the window of the last episodes is full."""
        return len(self._window) == WINDOW

    @property
    def return_mean(self) -> float:
        """Mean return of the last 100 completed episodes; NaN before the first."""
        with self._lock:
            return sum(r for r, _ in self._window) / len(self._window) if self._window else float("nan")

    def metrics(self) -> dict[str, Any]:
        mean = self.return_mean
        with self._lock:
            lengths = [n for _, n in self._window]
            values: dict[str, Any] = {
                "episodes": self.episodes,
                "episode_return_mean": mean if lengths else None,
                "episode_length_mean": sum(lengths) / len(lengths) if lengths else None,
            }
            if any("clients" in info for info in self._info.values()):
                values["clients"] = int(sum(info.get("clients", 0) for info in self._info.values()))
                for worker, info in self._info.items():
                    values[f"clients_by_worker/{worker}"] = int(info.get("clients", 0))
            return values

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {"episodes": self.episodes, "window": [list(pair) for pair in self._window]}

    def restore(self, state: dict[str, Any]) -> None:
        with self._lock:
            self.episodes = int(state["episodes"])
            self._window.extend((float(r), int(n)) for r, n in state["window"])


def iteration_metrics(
    algorithm: Algorithm, trained_before: dict[int, int], learned: dict[str, float], *, sample: float, learn: float
) -> dict[str, Any]:
    """The metrics of the iteration that has just ended.

    trained_before: steps trained by worker before it; learned: the learner's own metrics; sample, learn: seconds.
    """
    books, queue = algorithm.queue.snapshot(), algorithm.queue
    batch = {w: n - trained_before.get(w, 0) for w, n in books["trained_by_worker"].items()}
    size = max(1, sum(batch.values()))
    return {
        "iteration": algorithm.iteration,
        "env_steps": books["received"],
        **algorithm.tracker.metrics(),
        "steps/received": books["received"],
        "steps/trained": books["trained"],
        **{f"steps/dropped/{reason}": books["dropped"].get(reason, 0) for reason in DROP_REASONS},
        "steps/pending": books["pending"],
        "steps/received_while_learning": books["received_learning"],
        "time/sample_s": sample,
        "time/learn_s": learn,
        "time/total_s": algorithm.seconds,
        "env_steps_per_s": size / (sample + learn) if sample + learn > 0 else None,
        "policy_version": algorithm.version,
        **learned,
        **{f"batch/share/{w}": n / size for w, n in sorted(batch.items())},
        "queue/bytes": queue.nbytes,
        "queue/peak_bytes": queue.peak_bytes,
        "queue/max_bytes": queue.max_bytes,
        **algorithm.tracker.evaluated(),
        **algorithm.team.evaluation.metrics(),
        **algorithm.meter.read(),
    }


def plain(value: Any) -> Any:
    """NumPy numbers become Python's, so that metrics of users can be saved; what JSON cannot hold becomes None."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
