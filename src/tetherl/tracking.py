"""What the algorithm keeps about episodes and clients for its metrics."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

from tetherl.data.fragment import Sample

WINDOW = 100
"""Training curves are the mean of the last 100 completed episodes, never of "the episodes of this iteration"."""


class Events(Protocol):
    def append(self, kind: str, /, **fields: Any) -> Any: ...


class Tracker:
    """Thread-safe: samples arrive in the engine's threads."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._window: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.episodes = 0
        self._info: dict[int, dict[str, float]] = {}
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
        for event in sample.events:
            self._events.append(event["kind"], **{key: value for key, value in event.items() if key != "kind"})

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
