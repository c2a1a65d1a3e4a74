"""What runs in processes of its own while serving is measured: clients, a bare server, a worker without a network."""

from __future__ import annotations

import asyncio
import base64
import os
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from aiohttp import WSMsgType, web

from tetherl.client import PolicyClient
from tetherl.protocol.messages import PROTOCOL_VERSION, Act, Action, EndEpisode, Hello, PhaseChange, StartEpisode
from tetherl.protocol.wire import decode_server, encode
from tetherl.server.loop_thread import LoopThread

if TYPE_CHECKING:  # the clients need no torch
    from tetherl.models.policy import ActResult
    from tetherl.workers.serving import ServingWorker
    from tetherl.workers.spec import WorkerSpec

EPISODE_STEPS = 500
SILENCE_S = 30.0
"""A server that says nothing for so long has failed."""


class LoadClient:
    """Plays in one thread for several clients, each with one request under way at a time.

    It writes and reads WebSocket frames itself: on a small machine a client's CPU time is taken from the server,
    and a WebSocket library would need more of it than the server does. Frames are masked as the standard asks,
    with a mask of zeros, which costs the server as much as any other.
    """

    def run(
        self, url: str, clients: int, observation: np.ndarray, seconds: float, start_at: float
    ) -> tuple[np.ndarray, float]:
        """Plays from `start_at` (monotonic clock) for `seconds`, or until the first reply if that comes later.

        Gives each request's latency in seconds, and how long it took in all.
        """
        players = [_Player(url, observation) for _ in range(clients)]
        selector = selectors.DefaultSelector()
        try:
            for player in players:
                player.prepare()
                selector.register(player.socket, selectors.EVENT_READ, player)
            time.sleep(max(0.0, start_at - time.monotonic()))
            started = time.monotonic()
            latencies: list[float] = []
            for player in players:
                player.act()
            while not latencies or time.monotonic() < started + seconds:
                ready = selector.select(SILENCE_S)
                if not ready:
                    raise TimeoutError(f"no reply from {url} within {SILENCE_S:g} s")
                for key, _ in ready:
                    latencies.append(key.data.answered())
                    key.data.act()
            return np.array(latencies, np.float32), time.monotonic() - started
        finally:
            selector.close()
            for player in players:
                player.socket.close()


class _Player:
    """One client and its only episode."""

    def __init__(self, url: str, observation: np.ndarray) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), SILENCE_S)
        self.socket.settimeout(None)  # a time limit would cost a system call per message
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = parts.netloc
        self._observation = {
            "dtype": observation.dtype.name,
            "shape": list(observation.shape),
            "data": observation.tobytes(),
        }
        self._received = b""
        self._id = self._step = 0
        self._sent_at = 0.0

    def prepare(self) -> None:
        """Handshake, hello, and the first episode."""
        key = base64.b64encode(os.urandom(16)).decode()
        lines = ["GET / HTTP/1.1", f"Host: {self._host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self.socket.sendall("\r\n".join(lines).encode())
        while b"\r\n\r\n" not in self._received:
            self._receive()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        if b" 101 " not in head.partition(b"\r\n")[0]:
            raise ConnectionError(f"no WebSocket handshake: {head[:200]!r}")
        self._ask(Hello(id=self._next_id(), protocol=PROTOCOL_VERSION))
        self._ask(StartEpisode(id=self._next_id(), episode="game"))

    def act(self) -> None:
        """Sends the next request; between two episodes, ends one and starts one first."""
        if self._step == EPISODE_STEPS:
            self._ask(EndEpisode(id=self._next_id(), episode="game", step=self._step, reward=1.0, terminated=True))
            self._ask(StartEpisode(id=self._next_id(), episode="game"))
            self._step = 0
        reward = 1.0 if self._step else 0.0
        self._sent_at = time.monotonic()
        self._send(
            Act(id=self._next_id(), episode="game", step=self._step, observation=self._observation, reward=reward)
        )
        self._step += 1

    def answered(self) -> float:
        """Reads the action that has come; gives the seconds since it was asked for."""
        message = self._reply()
        if not isinstance(message, Action):
            raise ConnectionError(f"expected an action, got {message}")
        return time.monotonic() - self._sent_at

    def _next_id(self) -> int:
        self._id += 1
        return self._id

    def _ask(self, message: Any) -> None:
        self._send(message)
        self._reply()

    def _send(self, message: Any) -> None:
        payload = encode(message)
        assert isinstance(payload, bytes)
        length = len(payload)
        if length < 126:
            header = struct.pack("!BB4x", 0x82, 0x80 | length)
        elif length < 65536:
            header = struct.pack("!BBH4x", 0x82, 0x80 | 126, length)
        else:
            header = struct.pack("!BBQ4x", 0x82, 0x80 | 127, length)
        sent = self.socket.sendmsg([header, payload])
        if sent < len(header) + length:
            self.socket.sendall((header + payload)[sent:])

    def _reply(self) -> Any:
        while True:
            opcode, payload = self._frame()
            if opcode == 0x8:
                raise ConnectionError(f"the server closed the connection: {payload[2:]!r}")
            if opcode != 0x2:  # a ping; no run is long enough for its answer to be missed
                continue
            message = decode_server(payload)
            if not isinstance(message, PhaseChange):
                return message

    def _frame(self) -> tuple[int, bytes]:
        while len(self._received) < 2:
            self._receive()
        opcode, length, start = self._received[0] & 0x0F, self._received[1], 2
        if length == 126:
            while len(self._received) < 4:
                self._receive()
            length, start = struct.unpack_from("!H", self._received, 2)[0], 4
        end = start + length
        while len(self._received) < end:
            self._receive()
        payload, self._received = self._received[start:end], self._received[end:]
        return opcode, payload

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._received += data


class RealClient:
    """What a user's program does: one PolicyClient, one round trip per step."""

    def run(
        self, url: str, clients: int, observation: np.ndarray, seconds: float, start_at: float
    ) -> tuple[np.ndarray, float]:
        """As `LoadClient.run`; `clients` must be 1."""
        assert clients == 1
        latencies: list[float] = []
        with PolicyClient(url) as client:
            episode, step = client.start_episode(), 0
            time.sleep(max(0.0, start_at - time.monotonic()))
            started = time.monotonic()
            while (before := time.monotonic()) < started + seconds or not latencies:
                client.get_action(episode, observation)
                latencies.append(time.monotonic() - before)
                client.log_returns(episode, 1.0)
                step += 1
                if step == EPISODE_STEPS:
                    client.end_episode(episode)
                    episode, step = client.start_episode(), 0
            return np.array(latencies, np.float32), time.monotonic() - started


class BareServer:
    """Answers every message with the same action, with nothing but the WebSocket library in between."""

    def __init__(self) -> None:
        reply = Action(re=100_000, episode="game", step=300, action=1, phase="collecting", policy_version=1)
        data = encode(reply)
        assert isinstance(data, bytes)
        self._reply = data
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._runner: web.ServerRunner | None = None
        self._thread = LoopThread("bare server")
        self._thread.start()
        self._thread.run(self._open(), SILENCE_S)

    def url(self) -> str:
        return f"ws://127.0.0.1:{self._socket.getsockname()[1]}/"

    def close(self) -> None:
        if self._runner is not None:
            self._thread.run(self._runner.cleanup(), SILENCE_S)
        self._thread.stop()

    async def _open(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._serve))
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        ws = web.WebSocketResponse(compress=False, max_msg_size=1 << 22)
        await ws.prepare(request)
        try:
            async for message in ws:
                if message.type is WSMsgType.BINARY:
                    await ws.send_bytes(self._reply)
        except (ConnectionError, asyncio.CancelledError):
            pass  # a client that has gone, or the end
        return ws


def worker_without_network(spec: WorkerSpec, token: str | None) -> ServingWorker:
    """A rollout worker that does everything but compute: its policy always answers the same."""
    from tetherl.models.policy import ActResult, Policy
    from tetherl.workers import serving

    class ConstantPolicy(Policy):
        def act(self, obs: dict[str, np.ndarray], *args: Any, **kwargs: Any) -> ActResult:
            rows = len(next(iter(obs.values())))
            actions = np.zeros((rows, self.actions.width), self.actions.dtype)
            dist = np.zeros((rows, self.dist.inputs_size), np.float32)
            return ActResult(actions, np.full(rows, -np.log(2), np.float32), dist, None)

    serving.Policy = ConstantPolicy  # type: ignore[misc]
    return serving.ServingWorker(spec, token)
