"""The sample queue: bounded in bytes, first come first served, books that balance and can be seen not to."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tetherl.data.fragment import Fragment, Sample, StepCounts
from tetherl.data.queue import SampleQueue

FOREVER = 10**9


def fragment(
    rows: int, *, worker: int = 1, version: int = 0, learning: bool = False, by_policy: bool = True
) -> Fragment:
    return Fragment(
        obs={"": np.zeros((rows, 4), np.float32)},
        final_obs={"": np.zeros(4, np.float32)},
        actions=np.zeros((rows, 1), np.int64),
        logp=np.zeros(rows, np.float32),
        dist=np.zeros((rows, 2), np.float32),
        rewards=np.zeros(rows, np.float32),
        versions=np.full(rows, version),
        by_policy=np.full(rows, by_policy),
        terminated=False,
        truncated=False,
        episode_id="e",
        t0=0,
        worker=worker,
        learning=np.full(rows, True) if learning else None,
    )


class Worker:
    """Pushes fragments with books that are right."""

    def __init__(self, queue: SampleQueue, index: int = 1) -> None:
        self.queue, self.index, self.books = queue, index, StepCounts()

    def push(self, *fragments: Fragment, still_open: int = 0) -> None:
        rows = sum(len(f) for f in fragments)
        self.books.received += rows + still_open - self.books.open
        self.books.emitted += rows
        self.books.open = still_open
        self.queue.put(Sample(self.index, list(fragments), [], self.books.copy()))


def test_books_balance_through_push_take_and_settle():
    queue = SampleQueue(10**6)
    one, two = Worker(queue, 1), Worker(queue, 2)
    one.push(fragment(10), fragment(5), still_open=3)
    two.push(fragment(7, worker=2))
    assert queue.snapshot()["pending"] == 25 and queue.snapshot()["balanced"]
    batch = queue.take(12, version=0, max_lag=1)
    assert [len(f) for f in batch] == [10, 5]
    assert queue.snapshot()["pending"] == 25, "steps in hand are pending"
    queue.settle(15, {}, version=0, max_lag=1)
    books = queue.snapshot()
    assert books["received"] == 25 and books["trained"] == 15 and books["pending"] == 10
    assert books["balanced"] and books["trained_by_worker"] == {1: 15}


def test_unbalanced_books_are_seen():
    queue = SampleQueue(10**6)
    queue.put(Sample(1, [fragment(10)], [], StepCounts(received=11, emitted=10)))
    assert not queue.snapshot()["balanced"]


def test_settling_other_numbers_than_taken_is_an_error():
    queue = SampleQueue(10**6)
    Worker(queue).push(fragment(10))
    queue.take(1, version=0, max_lag=1)
    with pytest.raises(RuntimeError, match="9 trained"):
        queue.settle(9, {}, version=0, max_lag=1)


def test_overflow_drops_the_oldest_and_counts_them():
    size = fragment(10).nbytes
    queue = SampleQueue(3 * size)
    worker = Worker(queue)
    for version in range(5):
        worker.push(fragment(10, version=version, learning=version == 0))
        assert queue.nbytes <= queue.max_bytes
    assert [f.versions[0] for f in queue.take(None, version=9, max_lag=FOREVER)] == [2, 3, 4]
    books = queue.snapshot()
    assert books["dropped"] == {"overflow": 20} and books["balanced"]
    assert queue.learning_fates.dropped["overflow"] == 10
    assert queue.peak_bytes == 3 * size


def test_fragment_larger_than_the_queue_is_counted_not_kept():
    queue = SampleQueue(100)
    Worker(queue).push(fragment(10))
    assert queue.nbytes == 0 and queue.snapshot()["dropped"] == {"overflow": 10}


def test_stale_and_foreign_rows_do_not_fill_a_batch():
    queue = SampleQueue(10**6)
    Worker(queue).push(fragment(10, version=0), fragment(10, version=5), fragment(10, version=5, by_policy=False))
    assert queue.wait(1, version=5, max_lag=2, timeout=0) == 10
    assert queue.wait(1, version=0, max_lag=2, timeout=0) == 20
    assert len(queue.take(10, version=5, max_lag=2)) == 2, "the stale fragment goes along and is accounted for"
    queue.settle(10, {"stale": 10}, version=5, max_lag=2)
    assert queue.snapshot()["balanced"] and queue.snapshot()["dropped"] == {"not_policy": 10, "stale": 10}


def test_fates_of_steps_that_arrived_while_learning():
    queue = SampleQueue(10**6)
    Worker(queue).push(fragment(4, version=0, learning=True), fragment(6, version=5, learning=True))
    queue.take(None, version=5, max_lag=2)
    queue.settle(6, {"stale": 4}, version=5, max_lag=2)
    assert queue.learning_fates.trained == 6 and queue.learning_fates.dropped["stale"] == 4


def test_wait_wakes_when_enough_has_come():
    queue = SampleQueue(10**6)
    threading.Timer(0.1, lambda: Worker(queue).push(fragment(10))).start()
    assert queue.wait(10, version=0, max_lag=1, timeout=60) == 10


def test_failure_wakes_the_waiter():
    queue = SampleQueue(10**6)
    threading.Timer(0.1, lambda: queue.fail(RuntimeError("worker 2 died"))).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="worker 2 died"):
        queue.wait(10, version=0, max_lag=1, timeout=60)
    assert time.monotonic() - started < 50


def test_lost_worker_and_restart_are_reasons():
    queue = SampleQueue(10**6)
    worker = Worker(queue)
    worker.push(fragment(10), still_open=4)
    queue.lose_worker(1)
    assert queue.snapshot()["dropped"] == {"worker_lost": 4} and queue.snapshot()["balanced"]
    after = SampleQueue(10**6)
    after.ledger.restore(queue.snapshot()["state"])
    assert after.snapshot()["dropped"] == {"restart": 10, "worker_lost": 4}
    assert after.snapshot()["received"] == 14 and after.snapshot()["balanced"]


def test_rows_that_are_not_the_policys_take_no_place():
    queue = SampleQueue(3 * fragment(10).nbytes)
    worker = Worker(queue)
    worker.push(fragment(10))
    for _ in range(20):
        worker.push(fragment(10, by_policy=False))
    assert queue.wait(10, version=0, max_lag=1, timeout=0) == 10
    assert queue.snapshot()["dropped"] == {"not_policy": 200} and queue.snapshot()["balanced"]
    assert not queue.overflowed


def test_a_full_queue_says_that_waiting_brings_no_more():
    queue = SampleQueue(3 * fragment(10).nbytes)
    worker = Worker(queue)
    for _ in range(3):
        worker.push(fragment(10))
    assert not queue.overflowed
    worker.push(fragment(10))
    assert queue.overflowed
    queue.take(None, version=0, max_lag=1)
    assert not queue.overflowed


def test_quarantined_fragments_are_nobodys_share():
    queue = SampleQueue(10**6)
    bad = fragment(4, worker=2)
    bad.rewards[1] = np.nan
    worker = Worker(queue)
    worker.push(fragment(6), bad)
    queue.take(None, version=0, max_lag=1)
    queue.settle(6, {"quarantined": 4}, version=0, max_lag=1)
    assert queue.snapshot()["trained_by_worker"] == {1: 6}
