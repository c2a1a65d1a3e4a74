"""A small policy server for client tests: real sockets, the real server half of the session, no policy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from tetherl.protocol.messages import (
    PROTOCOL_VERSION,
    Act,
    Action,
    Bye,
    Done,
    Error,
    Hello,
    PhaseChange,
    Redirect,
    Welcome,
)
from tetherl.protocol.server_session import ServerSession

OBSERVATION_SPACE = {"type": "Box", "low": -10, "high": 10, "shape": [4], "dtype": "float32"}
ACTION_SPACE = {"type": "Discrete", "n": 2}


def decode_observation(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != (4,):
        raise ValueError(f"observation has shape {array.shape}, expected (4,)")
    return array


class FakeServer:
    """Answers every act with `self.action`; `received` holds the accepted messages in order."""

    def __init__(self, port: int = 0, *, token: str | None = None, redirect: str | None = None) -> None:
        self.token = token
        self.redirect = redirect
        self.phase: Any = "collecting"
        self.policy_version = 0
        self.resumes_in_s: float | None = None
        self.env_config: dict[str, Any] = {}
        self.action: Any = 1
        self.action_space: dict[str, Any] = ACTION_SPACE
        self.refuse_hello: Error | None = None
        self.refuse_act: str | None = None
        self.received: list[Any] = []
        self.sessions = 0
        self.released = threading.Event()  # act waits for it: cleared = hold
        self.released.set()
        self._connections: set[ServerConnection] = set()
        self._lock = threading.Lock()
        self._server = serve(self._handle, "127.0.0.1", port, compression=None, max_size=2**24, ping_interval=None)
        self.port: int = self._server.socket.getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def of_type(self, kind: type) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    def push_phase(self, phase: str, version: int, resumes_in_s: float | None = None) -> None:
        with self._lock:
            self.phase, self.policy_version, self.resumes_in_s = phase, version, resumes_in_s
            for connection in self._connections:
                connection.send(connection.tetherl.encode(PhaseChange(**self._state())))

    def kill(self) -> None:
        """Like kill -9: sockets close without a goodbye, the port is free again."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(2)
        self.released.set()
        self._server.shutdown()
        self._thread.join(10)

    def _state(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "policy_version": self.policy_version,
            "resumes_in_s": self.resumes_in_s,
        }

    def _handle(self, connection: ServerConnection) -> None:
        session = ServerSession(
            token=self.token,
            max_episodes=4,
            max_message_bytes=2**20,
            decode_observation=decode_observation,
        )
        connection.tetherl = session
        try:
            for data in connection:
                message = session.receive(data)
                if not isinstance(message, Error):
                    self.received.append(message)
                if isinstance(message, Hello):
                    with self._lock:  # a phase is told by the welcome or by a push, never lost between them
                        connection.send(session.encode(self._answer(message)))
                        self._connections.add(connection)
                    continue
                reply = message if isinstance(message, Error) else self._answer(message)
                if reply is not None:
                    connection.send(session.encode(reply))
                if session.closed:
                    return
        except (ConnectionClosed, OSError):
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, message: Any) -> Any:
        if isinstance(message, Hello):
            if self.refuse_hello is not None:
                return self.refuse_hello
            if self.redirect is not None:
                return Redirect(re=message.id, url=self.redirect)
            self.sessions += 1
            return Welcome(
                re=message.id,
                protocol=PROTOCOL_VERSION,
                server="fake",
                session=f"s{self.sessions}",
                worker=1,
                observation_space=OBSERVATION_SPACE,
                action_space=self.action_space,
                env_config=self.env_config,
                **self._state(),
            )
        if isinstance(message, Bye):
            return None
        if isinstance(message, Act):
            self.released.wait(60)
            if self.refuse_act is not None:
                return Error(re=message.id, code=self.refuse_act, message="no action is chosen")
            return Action(
                re=message.id,
                episode=message.episode,
                step=message.step,
                action=self.action,
                **self._state(),
            )
        return Done(re=message.id, **self._state())


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not become true in time"
        time.sleep(0.01)


@pytest.fixture
def eventually() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def start_server() -> Iterator[Callable[..., FakeServer]]:
    """start_server(port=0, token=..., redirect=...) -> FakeServer; all are killed after the test."""
    servers: list[FakeServer] = []

    def start(*args: Any, **kwargs: Any) -> FakeServer:
        servers.append(FakeServer(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
