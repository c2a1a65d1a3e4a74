"""The HTTP side of a listening socket: lets WebSocket connections in, answers the rest with one line."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tetherl.server.listen import refuse_request, watch_peer

MAX_LINE = 64 << 10
"""Bytes of a request line: a front door asks about all its tickets in one."""

GRACE_S = 0.5


class Gate:
    """Accepts connections on a bound socket inside the running loop.

    Args:
        serve: handles a WebSocket request, for as long as the connection lasts.
        status: answers GET /status.
        any_origin: web pages of other hosts may connect.
        first_word_s: a connection that has not become a WebSocket by then is closed.
        max_connections: further ones are dropped at once.
    """

    def __init__(
        self,
        sock: socket.socket,
        serve: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        status: Callable[[web.BaseRequest], web.Response] | None = None,
        *,
        any_origin: bool,
        first_word_s: float,
        max_connections: int,
    ) -> None:
        self._sock = sock
        self._serve = serve
        self._status = status
        self._any_origin = any_origin
        self._first_word_s = first_word_s
        self._max_connections = max_connections
        self._let_in: dict[asyncio.Transport, asyncio.Task[Any] | None] = {}
        self._runner: web.ServerRunner | None = None

    async def open(self) -> None:
        server = _CountingServer(
            self._handle, self._accept, lingering_time=0.0, access_log=None, max_line_size=MAX_LINE
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._sock, backlog=1024).start()

    async def close(self) -> None:
        """Frees the port; connections that do not end soon are cancelled."""
        ending = [task for task in self._let_in.values() if task is not None]
        if ending:
            await asyncio.wait(ending, timeout=GRACE_S)
        if self._runner is not None:
            await self._runner.cleanup()
        self._sock.close()

    def _accept(self, transport: asyncio.Transport, connections: int) -> None:
        if connections > self._max_connections:
            transport.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            watch_peer(sock)
        asyncio.get_running_loop().call_later(self._first_word_s, self._check_first_word, transport)

    def _check_first_word(self, transport: asyncio.Transport) -> None:
        if transport not in self._let_in:
            transport.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._status is not None and request.path == "/status" and request.method == "GET":
            return self._status(request)
        refusal = refuse_request(request, any_origin=self._any_origin)
        if refusal is not None:
            return refusal
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("connection lost before it was answered")
        self._let_in[transport] = asyncio.current_task()
        try:
            return await self._serve(request)
        finally:
            del self._let_in[transport]


class _CountingServer(web.Server):
    """Reports each new connection before anything is read from it."""

    def __init__(self, handler: Any, accept: Callable[[asyncio.Transport, int], None], **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self._accept = accept

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._accept(transport, len(self.connections))
