"""One address for all clients: answers each `hello` with the rollout worker that has the fewest sessions."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import WSMsgType, web

from tetherl.errors import ServerError
from tetherl.protocol.messages import Error, Hello, Redirect
from tetherl.protocol.server_session import ServerSession
from tetherl.server.connection import close_websocket, send_now, websocket
from tetherl.server.listen import bind, check_exposure, is_loopback, url_of, ws_url
from tetherl.server.loop_thread import LoopThread
from tetherl.server.web import Gate

ASK_TIMEOUT_S = 3.0
LEAVE_ALONE_S = 2.0
"""A worker that did not answer is not asked again for this long, while another one answers."""

TICKET_S = 15.0
"""A client that was sent to a worker counts there for this long until it arrives."""

MAX_MESSAGE_BYTES = 64 << 10
MAX_CONNECTIONS = 4096

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Worker:
    """What the door knows of one worker. `tickets`: given to clients that have not arrived -> expiry."""

    url: str
    purpose: str
    sessions: int = 0
    max_sessions: int = 0
    reachable: bool = False
    ask_again_at: float = 0.0
    tickets: dict[str, float] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return self.sessions + len(self.tickets)

    @property
    def place(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80


class FrontDoor:
    """Redirects, does not proxy. Lives in a loop of its own thread: `start`, `set_workers`, `stop`.

    It asks the workers for their sessions at each hello, so clients that connect to a worker directly, leave
    or lose their worker are counted right. A ticket in the URL handed out tells who is still under way.

    Args:
        worker_urls: policy servers for clients that train (`PolicyServer.start` gives them).
        evaluation_urls: policy servers for clients with purpose `evaluate`; if none, the others take them.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str | None,
        worker_urls: Sequence[str],
        *,
        evaluation_urls: Sequence[str] = (),
        allow_open: bool = False,
        hello_timeout_s: float = 10.0,
    ) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._allow_open = allow_open
        self._hello_timeout_s = hello_timeout_s
        self._thread = LoopThread("front door")
        self._workers: list[_Worker] = []
        self._assigning = asyncio.Lock()
        self._gate: Gate | None = None
        self._client: aiohttp.ClientSession | None = None
        self._stopped = False
        self._set(worker_urls, evaluation_urls)

    def start(self) -> str:
        """Listens; returns ws://host:port/.

        Raises:
            ConfigError: it would listen beyond loopback without a token.
            ServerError: the port is in use.
        """
        check_exposure(self._host, self._token, self._allow_open)
        sock = bind(self._host, self._port, "external.port")
        self._gate = Gate(
            sock,
            self._serve,
            any_origin=self._token is not None or not is_loopback(self._host),
            first_word_s=self._hello_timeout_s,
            max_connections=MAX_CONNECTIONS,
        )
        self._thread.start()
        try:
            self._thread.run(self._open(), 10.0)
        except BaseException:
            self.stop()
            raise
        return url_of(self._host, sock)

    def set_workers(self, worker_urls: Sequence[str], evaluation_urls: Sequence[str] = ()) -> None:
        """The workers from now on; those that stay keep their counts."""
        self._thread.call(lambda: self._set(worker_urls, evaluation_urls))

    @property
    def counts(self) -> dict[str, int]:
        """Worker URL -> sessions there, and clients on the way, as of the last hello."""
        return {worker.url: worker.load for worker in self._workers}

    def stop(self) -> None:
        """Frees the port. Twice is fine."""
        if self._stopped:
            return
        self._stopped = True
        if self._gate is not None:
            try:
                self._thread.run(self._close(), 10.0)
            except ServerError as error:
                _log.warning("%s", error)
        self._thread.stop()

    def _set(self, worker_urls: Sequence[str], evaluation_urls: Sequence[str]) -> None:
        known = {(worker.url, worker.purpose): worker for worker in self._workers}
        wanted = [(url, "train") for url in worker_urls] + [(url, "evaluate") for url in evaluation_urls]
        self._workers = [known.get(key) or _Worker(*key) for key in wanted]

    async def _open(self) -> None:
        assert self._gate is not None
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S),
            headers={"Authorization": f"Bearer {self._token}"} if self._token is not None else {},
            trust_env=False,
        )
        await self._gate.open()

    async def _close(self) -> None:
        if self._gate is not None:
            await self._gate.close()
        if self._client is not None:
            await self._client.close()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        ws = websocket(MAX_MESSAGE_BYTES)
        await ws.prepare(request)
        session = ServerSession(token=self._token, max_episodes=1, max_message_bytes=MAX_MESSAGE_BYTES)
        try:
            received = await ws.receive(self._hello_timeout_s)
        except TimeoutError:
            text = f"no hello came within {self._hello_timeout_s:g} s"
            send_now(ws, session.encode(Error(re=None, code="not_greeted", message=text, fatal=True)))
            await close_websocket(ws, 1008, text)
            return ws
        if received.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
            return ws
        message = session.receive(received.data)
        if isinstance(message, Hello):
            message = await self._assign(message, request)  # type: ignore[assignment]
        send_now(ws, session.encode(message))
        await close_websocket(ws, 1000, "")
        return ws

    async def _assign(self, hello: Hello, request: web.BaseRequest) -> Redirect | Error:
        async with self._assigning:  # one after the other: each must see where the one before it went
            candidates = self._candidates(hello.purpose)
            await self._ask(candidates)
            reachable = [worker for worker in candidates if worker.reachable]
            free = [worker for worker in reachable if worker.load < worker.max_sessions]
            if not free:
                if reachable:
                    text = "every rollout worker has as many sessions as external.max_sessions allows"
                    return Error(re=hello.id, code="server_full", message=text)
                text = f"none of {len(candidates)} rollout workers can be reached now; try again"
                return Error(re=hello.id, code="not_ready", message=text)
            chosen = min(free, key=lambda worker: worker.load)
            ticket = secrets.token_hex(5)
            chosen.tickets[ticket] = asyncio.get_running_loop().time() + TICKET_S
        return Redirect(re=hello.id, url=f"{_as_reached(chosen, request)}?ticket={ticket}")

    def _candidates(self, purpose: str) -> list[_Worker]:
        return [w for w in self._workers if w.purpose == purpose] or [w for w in self._workers if w.purpose == "train"]

    async def _ask(self, workers: list[_Worker]) -> None:
        """Brings what is known of the workers up to date."""
        now = asyncio.get_running_loop().time()
        asked = [worker for worker in workers if worker.ask_again_at <= now]
        await asyncio.gather(*(self._ask_one(worker) for worker in asked))
        left_alone = [worker for worker in workers if worker not in asked]
        if left_alone and not any(worker.reachable for worker in asked):
            await asyncio.gather(*(self._ask_one(worker) for worker in left_alone))

    async def _ask_one(self, worker: _Worker) -> None:
        assert self._client is not None
        host, port = worker.place
        url = "http" + ws_url(_LOCAL.get(host, host), port)[2:] + "status"
        now = asyncio.get_running_loop().time()
        try:
            async with self._client.get(url, params={"tickets": ",".join(worker.tickets)}) as response:
                response.raise_for_status()
                answer = await response.json()
            worker.sessions, worker.max_sessions = int(answer["sessions"]), int(answer["max_sessions"])
            arrived = set(answer["seen"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            _log.debug("worker %s does not answer: %r", worker.url, error)
            worker.reachable, worker.sessions = False, 0
            if isinstance(error, aiohttp.ClientConnectorError):  # nobody is there: nobody will arrive
                worker.tickets.clear()
            worker.ask_again_at = asyncio.get_running_loop().time() + LEAVE_ALONE_S
            return
        worker.reachable, worker.ask_again_at = True, 0.0
        worker.tickets = {t: end for t, end in worker.tickets.items() if t not in arrived and end > now}


_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address that stands for all of this machine -> one that can be connected to."""


def _as_reached(worker: _Worker, request: web.BaseRequest) -> str:
    """The worker's URL, with the host under which the client found this door if the worker listens on all."""
    host, port = worker.place
    if host in _LOCAL:
        host = _header_host(request) or _own_address(request) or _LOCAL[host]
    return ws_url(host, port)


def _header_host(request: web.BaseRequest) -> str | None:
    try:
        return urlsplit(f"//{request.headers.get('Host', '')}").hostname
    except ValueError:
        return None


def _own_address(request: web.BaseRequest) -> str | None:
    place: Any = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return place[0] if isinstance(place, tuple) else None
