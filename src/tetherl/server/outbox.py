"""What a policy server has ready for the algorithm: fragments, finished episodes, events; bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from tetherl.data.fragment import EpisodeStats, Fragment, StepCounts

MAX_EVENTS = 1000
MAX_EPISODES = 10_000


class Outbox:
    """At most `max_bytes` of fragments, or a single one. The oldest make room, counted `overflow`.

    Lives in the server's loop; `changed` is set whenever something came in.
    """

    def __init__(self, books: StepCounts, max_bytes: int) -> None:
        self.rows = 0
        self.nbytes = 0
        self.changed = asyncio.Event()
        self._books = books
        self._max_bytes = max_bytes
        self._fragments: deque[Fragment] = deque()
        self._episodes: deque[EpisodeStats] = deque(maxlen=MAX_EPISODES)
        self._events: deque[dict[str, Any]] = deque()
        self._events_lost = 0
        self._overflow_rows = 0

    @property
    def episodes(self) -> int:
        return len(self._episodes)

    def put(self, fragment: Fragment) -> None:
        self._fragments.append(fragment)
        self.rows += len(fragment)
        self.nbytes += fragment.nbytes
        while self.nbytes > self._max_bytes and len(self._fragments) > 1:
            self._drop_oldest()
        self.changed.set()

    def finished(self, episode: EpisodeStats) -> None:
        self._episodes.append(episode)
        self.changed.set()

    def event(self, kind: str, **fields: Any) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._events_lost += 1
        else:
            self._events.append({"kind": kind, **fields})

    def drain(self) -> tuple[list[Fragment], list[EpisodeStats], list[dict[str, Any]]]:
        """Hands everything over; the books' `emitted` rows have then all left."""
        if self._overflow_rows:
            self._events.append(
                {
                    "kind": "warning",
                    "message": f"{self._overflow_rows} steps were dropped: finished fragments were not "
                    f"fetched before they exceeded {self._max_bytes} bytes",
                }
            )
        if self._events_lost:
            self._events.append({"kind": "warning", "message": f"{self._events_lost} more events were lost"})
        fragments, episodes, events = list(self._fragments), list(self._episodes), list(self._events)
        self._fragments.clear()
        self._episodes.clear()
        self._events.clear()
        self.rows = self.nbytes = self._events_lost = self._overflow_rows = 0
        return fragments, episodes, events

    def _drop_oldest(self) -> None:
        oldest = self._fragments.popleft()
        steps = len(oldest)
        self.rows -= steps
        self.nbytes -= oldest.nbytes
        self._books.emitted -= steps
        self._books.drop("overflow", steps)
        self._overflow_rows += steps
