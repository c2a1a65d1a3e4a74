"""A connection to a policy server that comes back by itself, and requests over it.

One thread per link dials, says hello, follows redirects, reads, and starts over when the connection is lost.
Calls come from other threads; each waits for the answer to its own request.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from tetherl.client.transport import ConnectionLost, WebSocket, WrongServer, check_url
from tetherl.errors import ClientError, DisconnectedError, RefusedError
from tetherl.protocol.client_session import ClientSession, Request
from tetherl.protocol.messages import Error, Redirect, ServerMessage, Welcome
from tetherl.protocol.wire import WireError

HELLO_TIMEOUT_S = 30.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 3.0
STABLE_AFTER_S = 5.0
"""A connection that held this long is not blamed for the next loss: dialling starts quickly again."""

MAX_REDIRECTS = 4
WORTH_RETRYING = frozenset(("server_full", "not_ready", "internal"))
"""Refusals of a hello that pass."""

_SLICE_S = 0.5
"""Waits are cut into slices because Windows does not interrupt a lock for Ctrl-C."""

_log = logging.getLogger(__name__)


class _Waiter:
    """One answer, from the reading thread to the caller. A bare lock: the cheapest wake-up there is."""

    __slots__ = ("_lock", "answer")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.answer: ServerMessage | ConnectionLost | None = None

    def resolve(self, answer: ServerMessage | ConnectionLost) -> None:
        self.answer = answer
        self._lock.release()

    def wait(self, timeout_s: float | None) -> ServerMessage | ConnectionLost | None:
        """The answer, or None when `timeout_s` passed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._lock.acquire(timeout=_SLICE_S):
            if deadline is not None and time.monotonic() >= deadline:
                return None
        return self.answer


class Link:
    """Lifecycle: construct -> `start` -> `call` ... -> `close`.

    Attributes:
        session: the newest session that was welcomed (a fresh one before the first).
        generation: connections made so far; what belongs to an earlier one is lost.
    """

    def __init__(
        self, url: str, *, token: str | None, name: str, purpose: str, on_phase: Callable[[str], None] | None
    ) -> None:
        self.url = check_url(url)
        self.generation = 0
        self._new_session = lambda: ClientSession(token=token, name=name, purpose=purpose)
        self.session = self._new_session()
        self._on_phase = on_phase
        self._resumes_at: float | None = None
        self._told_phase = ""
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._socket: WebSocket | None = None  # dialling or up
        self._up = False
        self._down_since = time.monotonic()
        self._problem = "not tried yet"
        self._failure: ClientError | None = None
        self._waiters: dict[int, _Waiter] = {}
        self._thread = threading.Thread(target=self._run, name="tetherl-client", daemon=True)

    def start(self) -> None:
        self._down_since = time.monotonic()
        self._thread.start()

    @property
    def up(self) -> bool:
        return self._up

    def wait_up(self, allowed_s: float) -> None:
        """Returns when connected; `allowed_s` counts from when the connection was lost (or `start`).

        Raises:
            RefusedError: the server will not have us.
            DisconnectedError: it took longer, or the link was closed.
        """
        with self._changed:
            while not self._up:
                self.raise_if_over()
                left = self._down_since + allowed_s - time.monotonic()
                if left <= 0:
                    raise DisconnectedError(
                        f"no connection to {self.url} within {allowed_s:g} s ({self._problem}); "
                        "is the server running, and is this its address?"
                    )
                self._changed.wait(min(left, _SLICE_S))

    def call(
        self,
        build: Callable[[ClientSession], Request],
        *,
        generation: int | None = None,
        timeout_s: float | None = None,
    ) -> ServerMessage:
        """Sends the request that `build` makes and returns its answer, which may be an `Error`.

        Raises:
            ConnectionLost: not connected, not on connection `generation`, or lost before the answer came.
            DisconnectedError: no answer within `timeout_s` (the connection is then given up), or closed.
            TypeError: the request holds something that cannot travel; nothing was sent.
        """
        if threading.current_thread() is self._thread:
            raise ClientError("on_phase must not make requests: it runs on the thread that reads their answers")
        with self._changed:
            self.raise_if_over()
            if not self._up or self._socket is None or generation not in (None, self.generation):
                raise ConnectionLost(self._problem)
            request_id, data = build(self.session)
            waiter = self._waiters[request_id] = _Waiter()
            socket = self._socket
            try:
                socket.send(data)  # inside the lock: ids must go out in order
            except ConnectionLost:
                socket.abandon()  # a message may be half sent
                raise
        answer = waiter.wait(timeout_s)
        if answer is None:
            socket.abandon()
            raise DisconnectedError(f"no answer from {self.url} within {timeout_s:g} s")
        if isinstance(answer, ConnectionLost):
            with self._changed:
                self.raise_if_over()
            raise answer
        return answer

    def close(self, patience_s: float = 2.0) -> None:
        """Says goodbye and ends; whoever waits gets DisconnectedError. Twice is fine, from any thread."""
        with self._changed:
            first, socket, up = not self._closing.is_set(), self._socket, self._up
            self._closing.set()
            if first and socket is not None and up:
                with contextlib.suppress(ConnectionLost):
                    socket.send(self.session.bye()[1])
                socket.finish()
        self._release_waiters("this client is closed")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            if up:
                self._thread.join(patience_s)  # the server reads the goodbye and closes
            if socket is not None:
                socket.abandon()
            self._thread.join(patience_s)

    def raise_if_over(self) -> None:
        """Raises what ended this link for good: RefusedError, or DisconnectedError after `close`."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._closing.is_set():
            raise DisconnectedError("this client is closed")

    # -- the link's own thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keep_connected()
            self._lose("this client is closed", None)
        except ClientError as error:
            self._lose(str(error), error)
        except BaseException as error:
            _log.exception("the client's connection thread failed")
            self._lose(str(error), ClientError(f"the client's connection thread failed: {error!r}"))

    def _keep_connected(self) -> None:
        jitter = random.Random()  # own generator: the program's random state is not ours to touch
        delay_s = BACKOFF_FIRST_S
        while not self._closing.is_set():
            try:
                connected_at = self._connect()
                try:
                    while True:
                        self._dispatch()
                finally:
                    if time.monotonic() - connected_at > STABLE_AFTER_S:
                        delay_s = BACKOFF_FIRST_S
            except (ConnectionLost, WireError) as error:
                self._lose(str(error), None)
            self._closing.wait(delay_s * jitter.uniform(0.5, 1.0))
            delay_s = min(delay_s * 1.7, BACKOFF_MOST_S)

    def _connect(self) -> float:
        """Dials, says hello, follows redirects. Returns the time at which the link was up."""
        url = self.url
        session = self._new_session()
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._ask(url, session)
            if isinstance(answer, Redirect):
                url = _redirected(url, answer.url)
                continue
            with self._changed:
                self.session = session
                self.generation += 1
                self._up = True
                self._changed.notify_all()
            self._tell_phase()
            return time.monotonic()
        raise ConnectionLost(f"more than {MAX_REDIRECTS} redirects, the last to {url}")

    def _ask(self, url: str, session: ClientSession) -> Welcome | Redirect:
        self._close_socket()
        try:
            socket = WebSocket(url)
        except WrongServer as error:
            raise RefusedError(f"{url} is not a tetherl server: {error}", code="wrong_server") from None
        except ConnectionLost as error:
            raise ConnectionLost(f"{url}: {error}") from None
        with self._changed:
            self._socket = socket
        if self._closing.is_set():
            raise ConnectionLost("this client is closed")
        request_id, data = session.hello()
        socket.send(data)
        while True:
            answered, message = session.receive(socket.receive(within_s=HELLO_TIMEOUT_S))
            if isinstance(message, Error):
                if message.code in WORTH_RETRYING:
                    raise ConnectionLost(message.message)
                raise RefusedError(message.message, code=message.code)
            if answered == request_id and isinstance(message, Welcome | Redirect):
                return message

    def _dispatch(self) -> None:
        assert self._socket is not None
        data = self._socket.receive()
        with self._changed:
            answered, message = self.session.receive(data)
            waiter = None if answered is None else self._waiters.pop(answered, None)
        if waiter is not None:
            waiter.resolve(message)
        elif isinstance(message, Error):
            if message.fatal:
                raise ConnectionLost(message.message)
            _log.warning("the server says: %s (%s)", message.message, message.code)
        expected = self.session.resumes_in_s
        self._resumes_at = None if expected is None else time.monotonic() + expected
        if self.session.phase != self._told_phase:
            self._tell_phase()

    @property
    def problem(self) -> str:
        """Why there is, or last was, no connection."""
        return self._problem

    @property
    def resumes_in_s(self) -> float | None:
        """What is left now of what the newest message said; 0 when it is overdue."""
        at = self._resumes_at
        return None if at is None else max(0.0, at - time.monotonic())

    def _tell_phase(self) -> None:
        self._told_phase = self.session.phase
        if self._on_phase is not None:
            try:
                self._on_phase(self._told_phase)
            except Exception:
                _log.exception("on_phase(%r) raised", self._told_phase)

    def _lose(self, problem: str, failure: ClientError | None) -> None:
        self._close_socket()
        with self._changed:
            if self._up:
                self._down_since = time.monotonic()
            self._up = False
            self._problem = problem
            self._failure = failure
        self._release_waiters(problem)

    def _release_waiters(self, problem: str) -> None:
        with self._changed:
            waiters = list(self._waiters.values())
            self._waiters.clear()
            self._changed.notify_all()
        for waiter in waiters:
            waiter.resolve(ConnectionLost(problem))

    def _close_socket(self) -> None:
        with self._changed:
            socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()


def _redirected(asked: str, target: str) -> str:
    """`target` with the host that was asked where it names "any address of this machine"."""
    target = check_url(target)
    parts = urlsplit(target)
    if parts.hostname in ("0.0.0.0", "::"):
        host = urlsplit(asked).hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        return parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host).geturl()
    return target
