"""The books of a run: every env step that arrived is counted exactly once.

`received = trained + sum(dropped) + pending`. Received and dropped-at-the-worker come from the workers' own books;
pending is counted where the steps are (open fragments, queue, the batch in hand), not derived, so that the equation
can fail and a test can see it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tetherl.data.fragment import StepCounts


class Ledger:
    """Books over all workers and resumes. Not thread-safe: the sample queue guards it with its lock."""

    def __init__(self) -> None:
        self.trained = 0
        self.queued = 0
        self.in_hand = 0
        self.trained_by_worker: Counter[int] = Counter()
        self._past_received = 0  # by workers that are gone, and before a resume
        self._past_learning = 0
        self._dropped: Counter[str] = Counter()
        self._workers: dict[int, StepCounts] = {}

    @property
    def received(self) -> int:
        return self._past_received + sum(c.received for c in self._workers.values())

    @property
    def received_learning(self) -> int:
        """Steps whose action was chosen while the learner learned."""
        return self._past_learning + sum(c.received_learning for c in self._workers.values())

    @property
    def dropped(self) -> dict[str, int]:
        total = Counter(self._dropped)
        for counts in self._workers.values():
            total.update(counts.dropped)
        return {reason: n for reason, n in sorted(total.items()) if n}

    @property
    def pending(self) -> int:
        return sum(c.open for c in self._workers.values()) + self.queued + self.in_hand

    def balanced(self) -> bool:
        return self.received == self.trained + sum(self.dropped.values()) + self.pending

    def report(self, worker: int, counts: StepCounts, fragment_steps: int) -> None:
        """A worker's books, and the steps that came with them (they are in the queue from now on)."""
        self._workers[worker] = counts
        self.queued += fragment_steps

    def drop(self, reason: str, steps: int) -> None:
        self._dropped[reason] += steps

    def lose_worker(self, worker: int) -> None:
        """A worker is gone: what lay in its open fragments is lost."""
        counts = self._workers.pop(worker, None)
        if counts is None:
            return
        self._past_received += counts.received
        self._past_learning += counts.received_learning
        self._dropped.update(counts.dropped)
        self.drop("worker_lost", counts.open)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "received": self.received,
            "received_learning": self.received_learning,
            "trained": self.trained,
            "dropped": self.dropped,
            "pending": self.pending,
            "trained_by_worker": {str(w): n for w, n in self.trained_by_worker.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue books from a checkpoint: what was pending then did not survive the restart."""
        self._past_received = int(state["received"])
        self._past_learning = int(state["received_learning"])
        self.trained = int(state["trained"])
        self._dropped = Counter({k: int(v) for k, v in state["dropped"].items()})
        self._dropped["restart"] += int(state["pending"])
        self.trained_by_worker = Counter({int(w): int(n) for w, n in state["trained_by_worker"].items()})
