"""The local engine: every actor has a fresh interpreter on this machine.

Fresh (started, not forked): nothing of the parent's threads, locks or CUDA state comes along. A script that
uses the engine needs no `if __name__ == "__main__"`: its classes and functions travel by value and its module
search path is passed on, but the script itself is never run again.

Each actor has one thread in the parent that reads its answers and sees to its end: whatever the cause, the
process is waited for, what it left in its process group is killed, all descriptors are closed, and then the
futures that are still open fail. Calls wait in the parent, not in the child, so they can be cancelled.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pathlib
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tetherl.engine.contract import Ref, Target, check_start
from tetherl.engine.failures import Failure, closed_error, death_error, method_error, start_error
from tetherl.engine.process import ChildProcess
from tetherl.engine.transport import Blob, Channel, Frame, Kind, Shared
from tetherl.errors import EngineError

_PACKAGES = str(pathlib.Path(__file__).resolve().parents[2])  # where this tetherl was imported from
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from tetherl.engine.child import main; main()"
_GRACE_S = 2.0
"""How long a process may take to end after its connection has closed, and after SIGTERM."""


class LocalRef(Ref):
    """A value in shared memory; the memory is freed with the last Ref and the last call that carries it."""

    def __init__(self, value: Any) -> None:
        self.blob = Blob.of(value, in_file=True)

    def get(self) -> Any:
        return self.blob.load()


@dataclass(slots=True)
class _Call:
    number: int
    method: str
    future: Future[Any]
    message: tuple[Blob, list[Blob]] | None


class LocalActor:
    """See `contract.Actor`."""

    def __init__(
        self,
        make: tuple[Target, tuple[Any, ...], dict[str, Any]],
        *,
        name: str,
        max_concurrency: int,
        env: dict[str, str] | None,
    ) -> None:
        self.name = name
        self.ready: Future[None] = Future()
        self.ready.set_running_or_notify_cancel()  # nobody can cancel it
        self._max_concurrency = max_concurrency
        self._lock = threading.Lock()  # guards what follows, and keeps calls in order on the socket
        self._numbers = itertools.count(1)
        self._waiting: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}
        self._slots = 0  # how many calls may run at once: 0 until the constructor has returned
        self._closing = False
        self._why_not: Callable[[], EngineError] | None = None  # why calls fail, once they do
        self._process: ChildProcess | None = None
        try:
            target, args, kwargs = make
            message = _message(target, args, kwargs, max_concurrency)
            self._spawn(env)
        except Exception as error:
            failure, cause = Failure.of(error), error
            self._why_not = lambda: start_error(name, failure, cause)
            self.ready.set_exception(self._why_not())
            return
        with contextlib.suppress(OSError):  # it has died already: the reader finds out
            self._channel.send(Kind.PATH, 0, Blob.of([p for p in sys.path if isinstance(p, str)]))
            self._channel.send(Kind.START, 0, *message)
        self._reader = threading.Thread(target=self._read, name=f"{name} reader", daemon=True)
        self._reader.start()

    def _spawn(self, env: dict[str, str] | None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        lifeline, self._lifeline = os.pipe()
        passed = (theirs.fileno(), lifeline)
        command = [
            sys.executable,
            "-P",
            "-c",
            _PROGRAM,
            _PACKAGES,
            self.name,
            *map(str, passed),
            str(os.getpid()),
        ]
        try:
            self._process = ChildProcess(command, name=self.name, env=env, pass_fds=passed)
            self._channel = Channel(ours)
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.exit_code is None else None

    def alive(self) -> bool:
        return self._why_not is None and not self._closing and self.pid is not None

    def gone(self) -> bool:
        """Whether nothing of it is left: no process, thread or descriptor."""
        return self._process is None or not self._reader.is_alive()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            message = _message(method, args, kwargs)
        except Exception as error:
            failure = EngineError(f"{self.name}: the arguments of {method}() cannot be sent: {error}")
            failure.__cause__ = error
            future.set_exception(failure)
            return future
        with self._lock:
            why_not = self._why_not
            if why_not is None and self._closing:
                why_not = self._closed
            if why_not is None:
                self._waiting.append(_Call(next(self._numbers), method, future, message))
                self._send_waiting()
        if why_not is not None:
            future.set_exception(why_not())
        return future

    def _send_waiting(self) -> None:
        """Send as many of the waiting calls as may run now. The lock is held."""
        while self._waiting and len(self._running) < self._slots:
            call = self._waiting.popleft()
            if not call.future.set_running_or_notify_cancel():
                continue
            self._running[call.number] = call
            message, call.message = call.message, None  # once sent, the memory is the receiver's
            assert message is not None
            with contextlib.suppress(OSError):  # it has died: the reader fails all running calls
                self._channel.send(Kind.CALL, call.number, *message)

    # ---- closing

    def close(self, timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        try:
            self.ask_to_close(deadline)
            self.wait_closed(deadline)
        except BaseException:  # Ctrl-C while waiting: no more patience
            self.kill()
            raise

    def ask_to_close(self, deadline: float) -> None:
        """Take no more calls, cancel those that wait, and ask the process to end."""
        self._closing = True
        # Not to be had in time only if a send is stuck, because the process does not read: then it is ended.
        if self._process is None or not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        try:
            cancelled = list(self._waiting)
            self._waiting.clear()
            if self._why_not is None:
                with contextlib.suppress(OSError):  # it has ended already
                    self._channel.send(Kind.CLOSE, 0, Blob())
        finally:
            self._lock.release()
        _cancel(cancelled)

    def wait_closed(self, deadline: float) -> None:
        """Wait until the process has ended and everything of it is gone; use force after the deadline."""
        if self._process is None:
            return
        if threading.current_thread() is self._reader:  # in a callback: this thread must go on reading
            threading.Thread(target=self.wait_closed, args=(deadline,), name=f"{self.name} closer").start()
            return
        self._reader.join(max(0.0, deadline - time.monotonic()))
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._reader.is_alive():
                return
            self._process.send_signal(number)
            self._process.wait(time.monotonic() + _GRACE_S)
            self._reader.join(_GRACE_S)

    def kill(self) -> None:
        """End the process now. What is left to do happens in the reader's thread."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    def _closed(self) -> EngineError:
        return closed_error(self.name)

    # ---- the reader's thread

    def _read(self) -> None:
        assert self._process is not None
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLIN)
        try:
            while True:
                if not poll.poll(1000):
                    # Its end closes the socket, unless a process that it forked holds a copy.
                    if self._process.exit_code is not None and not poll.poll(0):
                        break
                elif (frame := self._channel.receive()) is None or not self._take(frame):
                    break
        except EngineError as error:
            message = f"{self.name} was ended: {error}"
            self._why_not = lambda: EngineError(message)
            self.kill()
        finally:
            self._end(self._process)

    def _take(self, frame: Frame) -> bool:
        """Do what a frame says; False if it was the last one."""
        if frame.kind == Kind.READY:
            with self._lock:
                self._slots = self._max_concurrency
                self._send_waiting()
            self.ready.set_result(None)
        elif frame.kind == Kind.NOT_STARTED:
            failure: Failure = frame.take()
            cause = failure.original()
            self._why_not = lambda: start_error(self.name, failure, cause)
            return False
        else:
            with self._lock:
                call = self._running.pop(frame.call)
                self._send_waiting()
            try:
                value = frame.take()
            except Exception as error:  # for example an object whose module is not to be had here
                failed = EngineError(f"{self.name}: the result of {call.method}() cannot be read here: {error}")
                failed.__cause__ = error
                call.future.set_exception(failed)
                return True
            if frame.kind == Kind.RESULT:
                call.future.set_result(value)
            else:
                call.future.set_exception(method_error(self.name, call.method, value, value.original()))
        return True

    def _end(self, process: ChildProcess) -> None:
        """The actor answers no more: leave nothing of it, then fail what still waits for it."""
        process.wait(time.monotonic() + _GRACE_S)
        process.end()
        with self._lock:
            running, waiting = list(self._running.values()), list(self._waiting)
            self._running.clear()
            self._waiting.clear()
            if self._why_not is None and self._closing:
                self._why_not = self._closed
            elif self._why_not is None:
                doing = f"running {running[0].method}()" if running else ""
                if not self.ready.done():
                    doing = "starting"
                self._why_not = lambda: death_error(
                    self.name,
                    process.exit_code,
                    doing=doing,
                    memory_bytes=process.memory_bytes,
                    output=process.tail(),
                )
            why_not = self._why_not
        self._channel.close()
        os.close(self._lifeline)
        if not self.ready.done():
            self.ready.set_exception(why_not())
        if self._closing:
            _cancel(waiting)
        else:
            running += [call for call in waiting if call.future.set_running_or_notify_cancel()]
        for call in running:
            call.future.set_exception(why_not())


class LocalEngine:
    """See `contract.Engine`. An engine that was not closed is closed when the interpreter exits."""

    def __init__(self) -> None:
        self._actors: list[LocalActor] = []
        self._lock = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        _open_engines.add(self)

    def start(
        self,
        target: Target,
        /,
        *args: Any,
        name: str,
        max_concurrency: int = 1,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> LocalActor:
        check_start(name, max_concurrency)
        with self._lock:
            if self._closed:
                raise EngineError(f"{name} cannot be started: the engine is closed")
            self._actors = [a for a in self._actors if not a.gone()]
            actor = LocalActor((target, args, kwargs), name=name, max_concurrency=max_concurrency, env=env)
            self._actors.append(actor)
        return actor

    def put(self, value: Any) -> LocalRef:
        return LocalRef(value)

    def close(self, timeout: float = 5.0) -> None:
        if os.getpid() != self._owner:
            return  # a forked copy of the owner: the actors are not its own
        with self._lock:
            self._closed = True
            actors, self._actors = self._actors, []
        deadline = time.monotonic() + timeout
        try:
            for actor in actors:
                actor.ask_to_close(deadline)
            for actor in actors:
                actor.wait_closed(deadline)
        except BaseException:  # Ctrl-C while waiting: no more patience
            for actor in actors:
                actor.kill()
            raise
        _open_engines.discard(self)


def _message(what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *more: Any) -> tuple[Blob, list[Blob]]:
    """What a call or a start says, and the shared values that go with it."""
    shared: list[Blob] = []

    def travelling(argument: Any) -> Any:
        if not isinstance(argument, LocalRef):
            return argument
        shared.append(argument.blob)
        return Shared(len(shared) - 1)

    args = tuple(travelling(a) for a in args)
    kwargs = {key: travelling(a) for key, a in kwargs.items()}
    return Blob.of((what, args, kwargs, *more)), shared


def _cancel(calls: list[_Call]) -> None:
    for call in calls:
        call.future.cancel()
        call.future.set_running_or_notify_cancel()  # wakes those who wait for it


_open_engines: set[LocalEngine] = set()


@atexit.register
def _close_forgotten() -> None:
    for engine in list(_open_engines):
        engine.close()
