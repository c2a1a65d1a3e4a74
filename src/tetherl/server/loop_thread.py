"""An asyncio loop in a thread of its own, with thread-safe ways in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from tetherl.errors import ServerError

T = TypeVar("T")


class LoopThread:
    """Construct, `start`, then `call` and `run` from any other thread, `stop` (twice is fine)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], T], timeout: float = 10.0) -> T:
        """Runs `function` inside the loop and returns its result or raises its exception.

        Raises:
            ServerError: the loop is stopped or did not answer within `timeout` seconds.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._check()
        self.loop.call_soon_threadsafe(run)
        return self._wait(future, timeout)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Runs `coroutine` inside the loop and returns its result or raises its exception.

        Raises:
            ServerError: the loop is stopped or the coroutine took longer than `timeout` seconds.
        """
        try:
            self._check()
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except BaseException:
            coroutine.close()
            raise
        return self._wait(future, timeout)

    def stop(self, timeout: float = 5.0) -> None:
        """Cancels what still runs in the loop and ends the thread."""
        if self._stopped:
            return
        self._stopped = True
        if not self._thread.ident:  # never started
            self.loop.close()
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)

    def _check(self) -> None:
        if self._stopped or not self._thread.is_alive():
            raise ServerError(f"{self.name} is not running")

    def _wait(self, future: Future[T], timeout: float) -> T:
        try:
            return future.result(timeout)
        except CancelledError:
            raise ServerError(f"{self.name} was stopped") from None
        except TimeoutError:
            if future.done():  # the work itself raised it
                raise
            future.cancel()
            raise ServerError(f"{self.name} did not answer within {timeout:g} s") from None

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
