"""The rollout workers of a run as the algorithm sees them: handles, never processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
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

    def alive(self) -> bool: ...


def answer(worker: Handle, method: str, future: Future[Any], timeout: float) -> Any:
    """The result of a call. EngineError naming the worker when it does not come within `timeout` seconds."""
    try:
        return future.result(max(0.0, timeout))
    except FutureTimeout:
        raise EngineError(
            f"{worker.name} did not answer {method}() in time; it hangs, or the machine is overloaded"
        ) from None


class RolloutGroup:
    """Feeds the sample queue from all rollout workers, first finished, first served."""

    def __init__(self, workers: dict[int, Handle], queue: SampleQueue, on_sample: Callable[[Sample], None]) -> None:
        self.workers = workers
        self._queue = queue
        self._on_sample = on_sample
        self._number = 0  # of the newest `sample` call; an interrupt ends all up to its number
        self._idle = threading.Condition()  # guards what follows; told when a call has been taken over
        self._serving = False
        self._asked: set[int] = set()

    def broadcast(self, method: str, *args: Any, timeout: float = CALL_TIMEOUT_S, **kwargs: Any) -> None:
        """Call all workers at once and wait until all have answered; raises what a worker raised.

        EngineError when one does not answer within `timeout` seconds.
        """
        calls = [(w, w.call(method, *args, **kwargs)) for w in self.workers.values()]
        deadline = time.monotonic() + timeout
        for worker, future in calls:
            answer(worker, method, future, deadline - time.monotonic())

    # Workers that step their own environments: the algorithm asks, between its asking they stand still.

    def collect(self, ready: Callable[[], bool], steps_per_call: int) -> None:
        """Let the workers sample until `ready()`, then stop them all; everything they stepped is in the queue.

        The same when `ready` raises. EngineError when a worker does not stop.
        """
        calls: dict[Future[Any], int] = {}
        try:
            while not ready():
                for index, worker in self.workers.items():
                    if index not in calls.values() and not ready():
                        self._number += 1
                        calls[worker.call("sample", steps_per_call, self._number)] = index
                        self._harvest(calls, timeout=0)
                self._harvest(calls, timeout=POLL_S)
        finally:
            self._stand_still(calls)

    def _stand_still(self, calls: dict[Future[Any], int]) -> None:
        for index in calls.values():
            self.workers[index].call("interrupt", self._number)
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while calls:
            self._harvest(calls, timeout=POLL_S)
            if calls and time.monotonic() > deadline:
                names = ", ".join(self.workers[index].name for index in calls.values())
                raise EngineError(
                    f"{names} did not stop sampling within {CALL_TIMEOUT_S:.0f} s: its environment hangs in a step"
                )

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
            idle = [index for index in self.workers if index not in self._asked]
            self._asked.update(idle)
        for index in idle:
            self._ask(index)

    def stop_serving(self) -> None:
        """Stop asking, and take over what the workers still hold in finished fragments."""
        with self._idle:
            self._serving = False
        # Clients wait meanwhile: a worker that has nothing to deliver must not keep them.
        self.broadcast("release")
        with self._idle:
            # Not only answered but taken over: a worker's books must arrive in their order.
            if not self._idle.wait_for(lambda: not self._asked, CALL_TIMEOUT_S):
                names = ", ".join(self.workers[index].name for index in sorted(self._asked))
                raise EngineError(f"{names} did not answer within {CALL_TIMEOUT_S:.0f} s")
        for worker, future in [(w, w.call("sample", 0.0)) for w in self.workers.values()]:
            self._accept(answer(worker, "sample", future, CALL_TIMEOUT_S))

    def _ask(self, index: int) -> None:
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
            # One decision under one lock: a worker counts as asked until nobody will ask it again, so that there is
            # never more than one call open at it.
            again = again and self._serving
            if not again:
                self._asked.discard(index)
                self._idle.notify_all()
        if again:
            self._ask(index)
