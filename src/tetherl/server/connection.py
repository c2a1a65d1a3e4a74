"""One client's connection: moves messages between its socket, its session and the open episodes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from aiohttp import WSMsgType, web

from tetherl.data.fragment import Leaves
from tetherl.protocol.messages import (
    AbortEpisode,
    Act,
    Bye,
    ClientMessage,
    EndEpisode,
    Error,
    Hello,
    LogAction,
    StartEpisode,
    Welcome,
)
from tetherl.protocol.server_session import ServerSession
from tetherl.server.episodes import EpisodeDesk, OpenEpisode
from tetherl.server.inference import Inference, Request
from tetherl.spaces import Leaf

MAX_UNREAD_BYTES = 1 << 20
"""Replies that a client may leave unread; beyond, its connection is dropped."""

CLOSE_TIMEOUT_S = 2.0
MESSAGES_IN_A_ROW = 64


class Host(Protocol):
    """What a connection needs of the server."""

    inference: Inference
    desk: EpisodeDesk
    hello_timeout_s: float
    max_message_bytes: int
    image_leaves: list[Leaf]

    def new_session(self) -> ServerSession: ...
    def admit(self, connection: Connection) -> Welcome | Error: ...
    def left(self, connection: Connection) -> None: ...
    def broken(self, error: Exception) -> None: ...


def send_now(ws: web.WebSocketResponse, data: bytes | str) -> None:
    """Writes a message into the transport's buffer, without a task and without waiting.

    A response made with an unlimited `writer_limit` never suspends while sending.
    """
    sending = ws.send_str(data) if isinstance(data, str) else ws.send_bytes(data)
    try:
        sending.send(None)
    except StopIteration:
        return
    except ConnectionError:  # it is going; the reading side notices and says so
        return
    sending.close()


def websocket(max_message_bytes: int) -> web.WebSocketResponse:
    """Takes messages somewhat larger than allowed, so that the session can say by how much."""
    return web.WebSocketResponse(
        timeout=CLOSE_TIMEOUT_S,
        compress=False,
        max_msg_size=2 * max_message_bytes + (1 << 20),
        writer_limit=sys.maxsize,
    )


async def close_websocket(ws: web.WebSocketResponse, code: int, reason: str) -> None:
    await ws.close(code=code, message=reason.encode()[:123])


class Connection:
    """From the handshake to the end. `reason` says why it ended; `ticket` is the one of a front door."""

    def __init__(self, host: Host, request: web.BaseRequest) -> None:
        self.session = host.new_session()
        self.session_id = ""
        self.reason = "connection lost"
        self.ticket = request.query.get("ticket", "")
        self.episodes: dict[str, OpenEpisode] = {}
        self._host = host
        self._request = request
        self._ws = websocket(host.max_message_bytes)
        self._looked_at_images = not host.image_leaves
        self._handlers: dict[type, Callable[[Any], None]] = {
            Act: self._act,
            LogAction: self._act,
            StartEpisode: self._start,
            EndEpisode: self._end,
            AbortEpisode: self._abort,
            Hello: self._hello,
            Bye: self._bye,
        }

    @property
    def client(self) -> str:
        """How the client is called in statistics and events."""
        return self.session.name or self.session_id

    async def run(self) -> web.WebSocketResponse:
        """Serves the client until either side closes."""
        await self._ws.prepare(self._request)
        timer = asyncio.get_running_loop().call_later(self._host.hello_timeout_s, self._check_hello)
        try:
            await self._read()
        except Exception as error:  # ours, not the client's: whoever reads samples must know
            self.reason = f"internal error: {error}"
            self._host.broken(error)
        finally:
            timer.cancel()
            self._leave()
        code = 1000 if self.reason == "said goodbye" else 1008
        await close_websocket(self._ws, code, self.reason)
        return self._ws

    def send(self, message: Any) -> None:
        self.send_encoded(self.session.encode(message))

    def send_encoded(self, data: bytes | str) -> None:
        send_now(self._ws, data)
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.reason = f"did not read its replies ({MAX_UNREAD_BYTES} bytes unread)"
            transport.abort()

    def ping(self) -> None:
        """Keeps proxies from closing an idle connection; no answer is waited for."""
        pinging = self._ws.ping()
        try:
            pinging.send(None)
        except (StopIteration, ConnectionError):
            return
        pinging.close()

    async def close(self, code: int, reason: str) -> None:
        """From the server's side."""
        self.reason = reason
        await close_websocket(self._ws, code, reason)

    async def _read(self) -> None:
        session, handled = self.session, 0
        while not session.closed:
            received = await self._ws.receive()
            if received.type is not WSMsgType.BINARY and received.type is not WSMsgType.TEXT:
                if received.type is WSMsgType.ERROR and self._ws.close_code == 1009:
                    self.reason = f"sent a message far above {self._host.max_message_bytes} bytes"
                elif received.type is WSMsgType.CLOSE:
                    self.reason = "closed the connection"
                return
            message = session.receive(received.data)
            if isinstance(message, Error):
                self.send(message)
                if message.fatal:
                    self.reason = f"refused: {message.message}"
                continue
            waits_for = self._busy(message)
            if waits_for is not None and not await self._until_free(waits_for):
                return
            self._handlers[type(message)](message)
            handled += 1
            if not handled % MESSAGES_IN_A_ROW:  # let the others in
                await asyncio.sleep(0)

    def _busy(self, message: ClientMessage) -> OpenEpisode | None:
        """The episode that must have its action before `message` can be taken."""
        name = getattr(message, "episode", None)
        episode = self.episodes.get(name) if name is not None else None
        if episode is None or episode.pending is None or isinstance(message, AbortEpisode):
            return None
        return episode

    async def _until_free(self, episode: OpenEpisode) -> bool:
        """Waits for the action of a pipelining client; False when the client has gone meanwhile."""
        while episode.pending is not None:
            episode.free = asyncio.get_running_loop().create_future()
            await asyncio.wait((episode.free,), timeout=1.0)
            if self._request.transport is None:
                return False
        return True

    def _hello(self, hello: Hello) -> None:
        answer = self._host.admit(self)
        if isinstance(answer, Welcome):
            answer.re = hello.id
        else:
            answer.re = hello.id
            self.session.closed = True
            self.reason = f"refused: {answer.message}"
        self.send(answer)

    def _start(self, message: StartEpisode) -> None:
        desk = self._host.desk
        if desk.full:
            self.session.open_episodes.pop(message.episode, None)
            text = f"{len(desk.episodes)} open episodes hold {desk.open_bytes} bytes, all that this worker may keep"
            self.send(Error(re=message.id, code="too_many_episodes", message=text))
            return
        self.episodes[message.episode] = self._host.desk.open(
            message.episode,
            self.client,
            self.session_id,
            training=message.training,
            evaluate=self.session.purpose == "evaluate",
        )
        self.send(self._host.inference.done(message.id))

    def _act(self, message: Act | LogAction) -> None:
        if not self._looked_at_images:
            self._look_at_images(message.observation)
        inference = self._host.inference
        action: np.ndarray | None = message.action if isinstance(message, LogAction) else None
        mask: Any = message.mask if isinstance(message, Act) else None
        inference.submit(
            Request(
                self,
                self.episodes[message.episode],
                message.id,
                message.step,
                message.observation,
                message.reward,
                action,
                asyncio.get_running_loop().time(),
                mask,
            )
        )

    def _end(self, message: EndEpisode) -> None:
        episode = self.episodes.pop(message.episode)
        self.send(self._host.inference.done(message.id))
        self._host.desk.end(
            episode,
            message.reward,
            terminated=message.terminated,
            truncated=message.truncated,
            final_obs=message.observation,
        )

    def _abort(self, message: AbortEpisode) -> None:
        episode = self.episodes.pop(message.episode)
        if episode.pending is not None:
            text = f"episode {message.episode!r} was aborted before its action was chosen"
            self.send(Error(re=episode.pending.id, code="unknown_episode", message=text))
        self.send(self._host.inference.done(message.id))
        self._drop(episode)

    def _bye(self, message: Bye) -> None:
        self.reason = "said goodbye"

    def _drop(self, episode: OpenEpisode) -> None:
        if episode.pending is not None:
            self._host.inference.withdraw(episode.pending)
        self._host.desk.abort(episode)

    def _leave(self) -> None:
        for episode in self.episodes.values():
            self._drop(episode)
        self._host.left(self)
        self.episodes.clear()

    def _check_hello(self) -> None:
        if self.session.greeted or self.session.closed:
            return
        self.session.closed = True
        self.reason = f"said no hello within {self._host.hello_timeout_s:g} s"
        self.send(Error(re=None, code="not_greeted", message=self.reason, fatal=True))
        self._closing = asyncio.ensure_future(self.close(1008, self.reason))

    def _look_at_images(self, obs: Leaves) -> None:
        """Once per session: an image of zeros and ones only was most likely cast before it was scaled."""
        self._looked_at_images = True
        for leaf in self._host.image_leaves:
            if obs[leaf.name].max() == 1:
                self._host.desk.outbox.event(
                    "warning",
                    client=self.client,
                    message=f"{self.client}: the first image {leaf.name!r} {leaf.shape} holds only 0 and 1; "
                    "was it converted to uint8 before it was multiplied by 255?",
                )
