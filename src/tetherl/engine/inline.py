"""The inline engine: actors are objects in the calling process.

For debugging, for tests that must be the same to the bit, and for runs that need no second process. Arguments
and results are handed over as they are, not copied.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tetherl.engine.contract import Ref, Target, check_start, load_target
from tetherl.engine.failures import Failure, closed_error, method_error, start_error
from tetherl.errors import EngineError

_log = logging.getLogger(__name__)


class InlineRef(Ref):
    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        return self._value


class InlineActor:
    """One object, called directly (max_concurrency 1) or in a pool of threads."""

    def __init__(self, make: Callable[[], Any], name: str, max_concurrency: int) -> None:
        self.name = name
        self.ready: Future[None] = Future()
        self._object: Any = None
        self._why_not: Callable[[], EngineError] | None = None  # why calls fail, once they do
        self._turn = threading.RLock()  # one call at a time, in order; reentrant: a method may call its own actor
        self._pool: ThreadPoolExecutor | None = None
        self._unfinished: set[Future[Any]] = set()
        try:
            self._object = make()
        except (Exception, SystemExit) as error:
            failure, cause = Failure.of(error), error
            self._why_not = lambda: start_error(name, failure, cause)
            self.ready.set_exception(self._why_not())
            return
        if max_concurrency > 1:
            self._pool = ThreadPoolExecutor(max_concurrency, thread_name_prefix=name)
        self.ready.set_result(None)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any]
        if self._why_not is not None:
            future = Future()
            future.set_exception(self._why_not())
        elif self._pool is not None:
            try:
                future = self._pool.submit(self._run, method, args, kwargs)
            except RuntimeError:  # closed by another thread in this instant
                future = Future()
                future.set_exception(closed_error(self.name))
            self._unfinished.add(future)
            future.add_done_callback(self._unfinished.discard)
        else:
            future = Future()
            future.set_running_or_notify_cancel()
            with self._turn:
                try:
                    result = self._run(method, args, kwargs)
                except EngineError as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        return future

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            function = getattr(self._object, method)
            return function(*map(_value, args), **{key: _value(value) for key, value in kwargs.items()})
        except (Exception, SystemExit) as error:
            raise method_error(self.name, method, Failure.of(error), error) from error

    def alive(self) -> bool:
        return self._why_not is None

    @property
    def pid(self) -> int | None:
        return None

    def close(self, timeout: float = 5.0) -> None:
        if self._why_not is not None:
            return
        self._why_not = lambda: closed_error(self.name)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if hasattr(self._object, "close"):
            try:
                self._object.close()
            except Exception:
                _log.warning("%s: its close() raised", self.name, exc_info=True)
        if self._pool is not None:
            running = list(self._unfinished)
            if concurrent.futures.wait(running, timeout).not_done:
                _log.warning(
                    "%s: a call is still running %g s after close(); a thread cannot be ended from outside, "
                    "so the actor's close() should make running calls return",
                    self.name,
                    timeout,
                )
            else:
                self._pool.shutdown(wait=True)
        self._object = None


class InlineEngine:
    """See `contract.Engine`; every actor lives in this process."""

    def __init__(self) -> None:
        self._actors: list[InlineActor] = []
        self._closed = False

    def start(
        self,
        target: Target,
        /,
        *args: Any,
        name: str,
        max_concurrency: int = 1,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> InlineActor:
        check_start(name, max_concurrency)
        if self._closed:
            raise EngineError(f"{name} cannot be started: the engine is closed")

        def make() -> Any:
            named = {key: _value(value) for key, value in kwargs.items()}
            return load_target(target)(*map(_value, args), **named)

        actor = InlineActor(make, name, max_concurrency)
        self._actors = [a for a in self._actors if a.alive()] + [actor]
        return actor

    def put(self, value: Any) -> InlineRef:
        return InlineRef(value)

    def close(self, timeout: float = 5.0) -> None:
        self._closed = True
        for actor in self._actors:
            actor.close(timeout)
        self._actors = []


def _value(argument: Any) -> Any:
    """What a method gets for an argument: a Ref is delivered as its value."""
    return argument.get() if isinstance(argument, Ref) else argument
