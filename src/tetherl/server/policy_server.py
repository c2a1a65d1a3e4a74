"""The policy server of one rollout worker: clients play over WebSocket, fragments come out."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import traceback
from collections import deque
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from tetherl.data.fragment import Sample, StepCounts
from tetherl.errors import ServerError
from tetherl.protocol.messages import PROTOCOL_VERSION, Error, Phase, PhaseChange, Welcome
from tetherl.protocol.server_session import ServerSession
from tetherl.protocol.wire import encode
from tetherl.server.config import ExternalConfig
from tetherl.server.connection import Connection
from tetherl.server.episodes import EpisodeDesk
from tetherl.server.inference import Inference
from tetherl.server.listen import bind, check_exposure, is_loopback, url_of
from tetherl.server.loop_thread import LoopThread
from tetherl.server.outbox import Outbox
from tetherl.server.web import Gate

if TYPE_CHECKING:
    from tetherl.models.policy import Policy

DEFAULT_EPISODE_STEPS = 100_000
PING_S = 20.0
CALL_TIMEOUT_S = 10.0
TICKETS_REMEMBERED = 10_000

_log = logging.getLogger(__name__)


def message_bytes(leaves: Iterable[Any]) -> int:
    """Bytes that a message may have: what the observation takes as JSON lists of numbers, plus 64 KiB.

    `leaves` are the observation codec's.
    """
    digits = {1: 7, 2: 9}  # "255, " and a sign; anything wider: up to 17 digits, exponent, separators
    total = 0
    for leaf in leaves:
        elements = int(np.prod(leaf.shape, dtype=np.int64))
        total += elements * digits.get(np.dtype(leaf.dtype).itemsize, 27)
    return total + (64 << 10)


class PolicyServer:
    """Serves clients in a loop of its own thread: `start`, `set_weights`, then `take` samples, `stop`.

    Until the first `set_weights`, sessions are accepted and action requests wait.

    Args:
        policy: chooses the actions, inside the server's loop.
        worker: index of the rollout worker, in fragments and in the welcome.
        worker_port: 0 for any free one.
        token: what clients must send; None accepts anyone.
        explore: False takes each distribution's mode. Sessions with purpose `evaluate` always play without.
        training: False for an evaluation server; nothing is counted, every episode goes into the statistics.
        observation_spec, action_spec: sent to clients; default: the configuration's.
        outbox_bytes: finished fragments that wait for `take`; beyond, the oldest are dropped as `overflow`.
        open_bytes: open episodes; beyond, the largest is cut.
    """

    def __init__(
        self,
        policy: Policy,
        config: ExternalConfig,
        *,
        worker: int,
        worker_port: int,
        token: str | None,
        batch_mode: str = "truncate_episodes",
        fragment_length: int = 128,
        state_every: int = 0,
        seed: int = 0,
        explore: bool = True,
        training: bool = True,
        observation_spec: dict[str, Any] | None = None,
        action_spec: dict[str, Any] | None = None,
        outbox_bytes: int = 1 << 30,
        open_bytes: int = 2 << 30,
    ) -> None:
        self.worker = worker
        self.hello_timeout_s = config.hello_timeout_s
        self.max_message_bytes = config.max_message_bytes or message_bytes(policy.codec.leaves)
        self.image_leaves = [leaf for leaf in policy.codec.leaves if leaf.kind == "image" and leaf.dtype == np.uint8]
        self._policy = policy
        self._config = config
        self._port = worker_port
        self._token = token
        self._training = training
        self._observation_spec = observation_spec or config.observation_space
        self._action_spec = action_spec or config.action_space
        self._thread = LoopThread(f"policy server of worker {worker}")
        self._books = StepCounts()
        self._outbox = Outbox(self._books, outbox_bytes)
        self.desk = EpisodeDesk(
            self._books,
            self._outbox,
            worker=worker,
            batch_mode=batch_mode,
            fragment_length=fragment_length,
            state_every=state_every,
            fate=config.during_learning,
            counted=training,
            max_steps=config.max_episode_steps or DEFAULT_EPISODE_STEPS,
            max_open_bytes=open_bytes,
            state_size=policy.state_size,
        )
        self.inference = Inference(
            policy,
            self.desk,
            explore=explore,
            seed=seed,
            hold=config.during_learning == "hold",
            loop=self._thread.loop,
        )
        self._sessions: dict[str, Connection] = {}
        self._tickets: deque[str] = deque(maxlen=TICKETS_REMEMBERED)
        self._gate: Gate | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = self._stopped = self._released = False

    # ---- from any thread

    def start(self) -> str:
        """Listens; returns ws://host:port/.

        Raises:
            ConfigError: it would listen beyond loopback without a token.
            ServerError: the port is in use.
        """
        address = self._config.address
        check_exposure(address, self._token, self._config.allow_open)
        sock = bind(address, self._port, "external.worker_port")
        url = url_of(address, sock)
        self._gate = Gate(
            sock,
            self._serve,
            self._status,
            any_origin=self._token is not None or not is_loopback(address),
            first_word_s=self.hello_timeout_s,
            max_connections=self._config.max_sessions + 256,
        )
        self._thread.start()
        self._started = True
        try:
            self._thread.run(self._open(), CALL_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        return url

    def set_weights(self, weights: dict[str, np.ndarray], version: int) -> None:
        """Every action from now on is chosen with these weights."""
        self._thread.call(lambda: self.inference.set_weights(weights, version), CALL_TIMEOUT_S)

    def set_phase(self, phase: Phase, resumes_in_s: float | None = None, *, cut: bool = False) -> None:
        """Tells all clients. With `cut`, the complete steps of open episodes leave now (see `take`)."""
        self._thread.call(lambda: self._enter(phase, resumes_in_s, cut), CALL_TIMEOUT_S)

    def take(self, timeout: float, min_steps: int = 1) -> Sample:
        """Everything finished; waits up to `timeout` seconds until that is at least `min_steps` steps.

        An evaluation server waits for the first finished episode instead.

        Raises:
            ServerError: the server has failed (with the traceback) or is stopped.
        """
        return self._thread.run(self._take(timeout, min_steps), timeout + CALL_TIMEOUT_S)

    def release(self) -> None:
        """A `take` that waits returns at once with what there is."""
        self._thread.call(self._release, CALL_TIMEOUT_S)

    def stop(self) -> None:
        """Says goodbye to the clients and frees the port. Twice is fine."""
        if self._stopped:
            return
        self._stopped = True
        if self._started:
            try:
                self._thread.run(self._close(), CALL_TIMEOUT_S)
            except ServerError as error:
                _log.warning("%s", error)
        self._thread.stop()

    # ---- inside the loop

    def new_session(self) -> ServerSession:
        return ServerSession(
            token=self._token,
            max_episodes=self._config.max_episodes_per_session,
            max_message_bytes=self.max_message_bytes,
            decode_observation=self._policy.codec.encode,
            decode_action=self._policy.actions.from_env,
            decode_mask=self._policy.actions.mask,
        )

    def admit(self, connection: Connection) -> Welcome | Error:
        """A client said a valid hello."""
        if self.inference.phase == "stopped":
            return Error(re=None, code="not_ready", message="training has stopped", fatal=True)
        if len(self._sessions) >= self._config.max_sessions:
            text = f"{len(self._sessions)} sessions are open, the most that external.max_sessions allows"
            return Error(re=None, code="server_full", message=text, fatal=True)
        connection.session_id = f"w{self.worker}-{secrets.token_hex(4)}"
        self._sessions[connection.session_id] = connection
        if connection.ticket:
            self._tickets.append(connection.ticket)
        session = connection.session
        self._event("client_joined", connection, name=session.name, purpose=session.purpose)
        inference = self.inference
        return Welcome(
            re=0,
            protocol=PROTOCOL_VERSION,
            server=f"tetherl {version('tetherl')}",
            session=connection.session_id,
            worker=self.worker,
            observation_space=self._observation_spec,
            action_space=self._action_spec,
            env_config=self._config.env_config,
            phase=inference.phase,
            policy_version=inference.version,
            resumes_in_s=inference.resumes_in_s,
            max_message_bytes=self.max_message_bytes,
        )

    def left(self, connection: Connection) -> None:
        if self._sessions.pop(connection.session_id, None) is not None:
            lost = len(connection.episodes)
            self._event("client_left", connection, reason=connection.reason, episodes_lost=lost)

    def broken(self, error: Exception) -> None:
        """An exception that no client caused: `take` raises it."""
        if self.inference.failure is None:
            self.inference.fail("".join(traceback.format_exception(error)))

    def _event(self, kind: str, connection: Connection, **fields: Any) -> None:
        self._outbox.event(kind, worker=self.worker, session=connection.session_id, client=connection.client, **fields)

    async def _open(self) -> None:
        assert self._gate is not None
        await self._gate.open()
        self._spawn(self._keep_alive())

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        return await Connection(self, request).run()

    def _status(self, request: web.BaseRequest) -> web.Response:
        """For the front door: how many sessions, and which of the tickets it asks about have arrived."""
        if self._token is not None:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                return web.Response(status=401, text="the server's token is needed\n")
        asked = set(request.query.get("tickets", "").split(","))
        return web.json_response(
            {
                "worker": self.worker,
                "sessions": len(self._sessions),
                "max_sessions": self._config.max_sessions,
                "seen": [ticket for ticket in self._tickets if ticket in asked],
            }
        )

    def _enter(self, phase: Phase, resumes_in_s: float | None, cut: bool) -> None:
        self.inference.set_phase(phase, resumes_in_s, cut=cut)
        change = PhaseChange(phase=phase, policy_version=self.inference.version, resumes_in_s=resumes_in_s)
        binary, text = encode(change), encode(change, as_json=True)
        for connection in list(self._sessions.values()):
            connection.send_encoded(text if connection.session.as_json else binary)
        if phase == "stopped":
            self._spawn(self._close_sessions("training has stopped"))

    async def _take(self, timeout: float, min_steps: int) -> Sample:
        loop, outbox = asyncio.get_running_loop(), self._outbox
        deadline = loop.time() + timeout
        self._released = False
        while self.inference.failure is None and outbox.rows < min_steps and not self._released:
            if (outbox.episodes and not self._training) or loop.time() >= deadline:
                break
            outbox.changed.clear()
            try:
                await asyncio.wait_for(outbox.changed.wait(), deadline - loop.time())
            except TimeoutError:
                break
        if self.inference.failure is not None:
            raise ServerError(f"the policy server of worker {self.worker} has failed:\n\n{self.inference.failure}")
        info = self._info()
        fragments, episodes, events = outbox.drain()
        return Sample(self.worker, fragments, episodes, self._books.copy(), info, events)

    def _release(self) -> None:
        self._released = True
        self._outbox.changed.set()

    def _info(self) -> dict[str, float]:
        info: dict[str, float] = {
            "clients": len(self._sessions),
            "episodes_open": len(self.desk.episodes),
            "episodes_aborted": self.desk.aborted,
            "open_bytes": self.desk.open_bytes,
            "outbox_bytes": self._outbox.nbytes,
            "memory_cuts": self.desk.memory_cuts,
            "waiting": self.inference.waiting,
        }
        self.desk.aborted = 0
        return info | self.inference.numbers()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            for connection in list(self._sessions.values()):
                connection.ping()

    async def _close_sessions(self, reason: str) -> None:
        await asyncio.gather(
            *(connection.close(1001, reason) for connection in list(self._sessions.values())),
            return_exceptions=True,
        )

    async def _close(self) -> None:
        await self._close_sessions("server stopped")
        if self._gate is not None:
            await self._gate.close()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
