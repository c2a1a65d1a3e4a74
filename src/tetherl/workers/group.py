"""The rollout workers of a run as the algorithm sees them: handles, never processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from tetherl.data.fragment import Sample
from tetherl.data.queue import SampleQueue
from tetherl.errors import EngineError

CALL_TIMEOUT_S = 120.0
"""Longest wait for a short call (weights, phase) to a worker before it counts as hung."""

POLL_S = 1.0
"""How long a serving worker's `sample` waits for its first fragment."""


class Handle(Protocol):
    """What an engine hands out for a worker."""

    name: str

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]: ...


class RolloutGroup:
    """Feeds the sample queue from all rollout workers, first finished, first served."""

    def __init__(self, workers: dict[int, Handle], queue: SampleQueue, on_sample: Callable[[Sample], None]) -> None:
        self.workers = workers
        self._queue = queue
        self._on_sample = on_sample
        self._idle = threading.Condition()  # guards what follows; told when a call has been taken over
        self._serving = False
        self._asked: set[int] = set()

    def broadcast(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call all workers at once and wait until all have answered; raises what a worker raised."""
        for future in [w.call(method, *args, **kwargs) for w in self.workers.values()]:
            future.result(CALL_TIMEOUT_S)

    # Workers that step their own environments: the algorithm asks, between its asking they stand still.

    def collect(self, ready: Callable[[], bool], steps_per_call: int) -> None:
        """Let the workers sample until `ready()`, then stop them all; everything they stepped is in the queue."""
        calls: dict[Future[Any], int] = {}
        while not ready():
            for index, worker in self.workers.items():
                if index not in calls.values() and not ready():
                    calls[worker.call("sample", steps_per_call)] = index
                    self._harvest(calls, timeout=0)
            self._harvest(calls, timeout=POLL_S)
        for index in calls.values():
            self.workers[index].call("interrupt")
        while calls:
            self._harvest(calls, timeout=CALL_TIMEOUT_S)

    def _harvest(self, calls: dict[Future[Any], int], timeout: float) -> None:
        done, _ = wait(calls, timeout=timeout, return_when=FIRST_COMPLETED)
        for future in done:
            calls.pop(future)
            self._accept(future.result())

    def _accept(self, sample: Sample) -> None:
        self._queue.put(sample)
        self._on_sample(sample)

    # Workers that serve clients: the clients set the pace, so one call is always open at each worker and its answer
    # goes into the queue from the engine's own thread, also while the algorithm learns.

    def start_serving(self) -> None:
        """Keep a `sample` call open at every worker."""
        with self._idle:
            self._serving = True
        for index in self.workers:
            self._ask(index)

    def stop_serving(self) -> None:
        """Stop asking, and take over what the workers still hold in finished fragments."""
        with self._idle:
            self._serving = False
            # Not only answered but taken over: a worker's books must arrive in their order.
            if not self._idle.wait_for(lambda: not self._asked, CALL_TIMEOUT_S):
                names = ", ".join(self.workers[index].name for index in sorted(self._asked))
                raise EngineError(f"{names} did not answer within {CALL_TIMEOUT_S:.0f} s")
        for future in [w.call("sample", 0.0) for w in self.workers.values()]:
            self._accept(future.result(CALL_TIMEOUT_S))

    def _ask(self, index: int) -> None:
        with self._idle:
            self._asked.add(index)
        self.workers[index].call("sample", POLL_S).add_done_callback(lambda done: self._answered(index, done))

    def _answered(self, index: int, future: Future[Any]) -> None:
        again = False
        try:
            self._accept(future.result())
            again = True
        except BaseException as error:
            # This runs in the engine's thread: the algorithm learns of it when it next looks at the queue.
            self._queue.fail(error)
        with self._idle:
            self._asked.discard(index)
            again = again and self._serving
            self._idle.notify_all()
        if again:
            self._ask(index)
