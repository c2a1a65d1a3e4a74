"""The sample queue: between rollout workers that push and the learner that takes. Bounded in bytes."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tetherl.data.accounting import Ledger
from tetherl.data.fragment import Fragment, Sample


@dataclass(slots=True)
class LearningFates:
    """What became of the steps whose action was chosen while the learner learned."""

    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A fragment with what makes counting its trainable rows cheap."""

    fragment: Fragment
    by_policy: int
    oldest_version: int

    def trainable(self, version: int, max_lag: int) -> int:
        if version - self.oldest_version <= max_lag:
            return self.by_policy
        return trainable_rows(self.fragment, version, max_lag)


class SampleQueue:
    """Fragments in order of arrival, first come, first served.

    Invariant: `nbytes <= max_bytes`. A push that would break it drops the oldest fragments, counted `overflow`; a
    push never blocks, so a full queue never stops a game. `fail` wakes every waiter with the error.
    """

    def __init__(self, max_bytes: int, ledger: Ledger | None = None) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.peak_bytes = 0
        self.overflowed = False  # steps were lost since the last batch was taken: waiting longer brings no more
        self.ledger = ledger or Ledger()
        self.learning_fates = LearningFates()
        self._fragments: deque[_Entry] = deque()
        self._in_hand: list[Fragment] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def put(self, sample: Sample) -> None:
        """Take over a worker's fragments and books."""
        with self._changed:
            self.ledger.report(sample.worker, sample.counts, sum(len(f) for f in sample.fragments))
            for fragment in sample.fragments:
                if not fragment.by_policy.any():  # nothing to train on: it must not take the place of others
                    self._drop(fragment, "not_policy")
                    continue
                size = fragment.nbytes
                while self._fragments and self.nbytes + size > self.max_bytes:
                    oldest = self._fragments.popleft().fragment
                    self.nbytes -= oldest.nbytes
                    self._drop(oldest, "overflow")
                    self.overflowed = True
                if size > self.max_bytes:
                    self._drop(fragment, "overflow")
                    continue
                entry = _Entry(fragment, int(fragment.by_policy.sum()), int(fragment.versions.min()))
                self._fragments.append(entry)
                self.nbytes += size
                self.peak_bytes = max(self.peak_bytes, self.nbytes)
            self._changed.notify_all()

    def _drop(self, fragment: Fragment, reason: str) -> None:
        self.ledger.queued -= len(fragment)
        self.ledger.drop(reason, len(fragment))
        self.learning_fates.dropped[reason] += _learning_rows(fragment)

    def fail(self, error: BaseException) -> None:
        """A worker has failed: whoever waits, or will wait, gets the error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self, steps: int, *, version: int, max_lag: int, timeout: float) -> int:
        """Wait until `steps` trainable steps are here, or the timeout passed; returns how many are.

        Trainable: chosen by the policy, and no more than `max_lag` versions older than `version`.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                ready = sum(entry.trainable(version, max_lag) for entry in self._fragments)
                left = deadline - time.monotonic()
                if ready >= steps or left <= 0:
                    return ready
                self._changed.wait(left)

    def take(self, steps: int | None, *, version: int, max_lag: int) -> list[Fragment]:
        """The oldest fragments, until they hold `steps` trainable steps (None: all). They are in hand until
        `settle`."""
        with self._changed:
            batch: list[Fragment] = []
            ready = 0
            while self._fragments and (steps is None or ready < steps):
                entry = self._fragments.popleft()
                self.nbytes -= entry.fragment.nbytes
                ready += entry.trainable(version, max_lag)
                batch.append(entry.fragment)
            taken = sum(len(f) for f in batch)
            self.ledger.queued -= taken
            self.ledger.in_hand += taken
            self.overflowed = False
            self._in_hand = batch
            return batch

    def settle(self, trained: int, dropped: dict[str, int], *, version: int, max_lag: int) -> None:
        """The batch in hand was learned from: `trained` steps, and `dropped` ones by reason."""
        with self._changed:
            if trained + sum(dropped.values()) != self.ledger.in_hand:
                raise RuntimeError(
                    f"the learner accounts for {trained} trained and {dropped} dropped steps, "
                    f"it was given {self.ledger.in_hand}"
                )
            self.ledger.in_hand = 0
            self.ledger.trained += trained
            for reason, n in dropped.items():
                self.ledger.drop(reason, n)
            for fragment in self._in_hand:
                if dropped.get("quarantined") and not _is_finite(fragment):
                    continue
                late = version - fragment.versions > max_lag
                rows = fragment.by_policy & ~late
                self.ledger.trained_by_worker[fragment.worker] += int(rows.sum())
                if fragment.learning is not None:
                    self.learning_fates.trained += int((fragment.learning & rows).sum())
                    self.learning_fates.dropped["stale"] += int((fragment.learning & fragment.by_policy & late).sum())
                    self.learning_fates.dropped["not_policy"] += int((fragment.learning & ~fragment.by_policy).sum())
            self._in_hand = []

    @property
    def received(self) -> int:
        """Env steps that have arrived so far."""
        with self._changed:
            return self.ledger.received

    def lose_worker(self, worker: int) -> None:
        with self._changed:
            self.ledger.lose_worker(worker)

    def snapshot(self) -> dict[str, Any]:
        """The books at this moment, consistent: received, trained, dropped, pending, balanced."""
        with self._changed:
            return {
                "received": self.ledger.received,
                "trained": self.ledger.trained,
                "dropped": self.ledger.dropped,
                "pending": self.ledger.pending,
                "balanced": self.ledger.balanced(),
                "received_learning": self.ledger.received_learning,
                "trained_by_worker": dict(self.ledger.trained_by_worker),
                "state": self.ledger.state(),
            }


def trainable_rows(fragment: Fragment, version: int, max_lag: int) -> int:
    """Rows that the policy chose and that are at most `max_lag` versions older than `version`."""
    return int(np.count_nonzero(fragment.by_policy & (version - fragment.versions <= max_lag)))


def _is_finite(fragment: Fragment) -> bool:
    arrays = (fragment.rewards, fragment.logp, fragment.dist, *fragment.obs.values())
    return all(np.isfinite(a).all() for a in arrays if a.dtype.kind == "f")


def _learning_rows(fragment: Fragment) -> int:
    return 0 if fragment.learning is None else int(fragment.learning.sum())
