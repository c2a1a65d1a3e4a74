"""One WebSocket over one socket: bytes in and out, keep-alive, nothing about what they mean.

The rules of WebSocket are those of the `websockets` library's protocol object; this file only moves its
bytes. That needs one thread (whoever calls `receive`), no event loop, and costs a caller of `send` no change
of thread. Proxy settings of the environment are not used.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from tetherl.errors import ConfigError

PING_AFTER_S = 20.0
"""Silence after which the other side is asked for a sign of life."""

DEAD_AFTER_S = 120.0
"""Silence (no answer to pings either) after which the connection counts as lost. A server that is only slow
to answer a request, however long, does answer pings."""

MAX_MESSAGE_BYTES = 64 * 2**20
_CHUNK = 65536


class ConnectionLost(Exception):
    """The connection could not be made or has ended; the text says why."""


class WrongServer(Exception):
    """What listens at the address answers HTTP, but will never answer WebSocket; the text says what came."""


def check_url(url: str) -> str:
    """`url` as ws:// or wss://; `host:port` and http(s):// are accepted.

    Raises:
        ConfigError: it is not an address.
    """
    text = url.strip()
    if "://" not in text:
        text = f"ws://{text}"
    scheme, _, rest = text.partition("://")
    scheme = {"http": "ws", "https": "wss"}.get(scheme.lower(), scheme.lower())
    text = f"{scheme}://{rest}"
    try:
        parts = urlsplit(text)
        usable = scheme in ("ws", "wss") and bool(parts.hostname) and not parts.fragment
        _ = parts.port  # raises ValueError when it is not a port
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"server address {url!r} is not of the form ws://host:port (or wss://host:port)")
    return text


class WebSocket:
    """An open connection. `send` from any thread; `receive` from one thread only.

    Raises (constructor):
        ConnectionLost: nothing answers, or not in time: worth another try.
        WrongServer: something else than a tetherl server answers.
    """

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        uri = parse_uri(url)
        self._lock = threading.Lock()  # guards the protocol object, and the order of what is written
        self._protocol = ClientProtocol(uri, max_size=MAX_MESSAGE_BYTES)
        self._messages: collections.deque[bytes | str] = collections.deque()
        self._parts: list[bytes] = []
        self._text = False
        try:
            self._socket: Any = socket.create_connection((uri.host, uri.port), timeout=timeout_s)
        except OSError as error:
            raise ConnectionLost(_reason(error)) from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if uri.secure:
                import ssl  # only where it is needed: loading it takes as long as everything else here

                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=uri.host)
            self._shake_hands(timeout_s)
        except OSError as error:
            self._socket.close()
            raise ConnectionLost(_reason(error)) from None
        except BaseException:
            self._socket.close()
            raise
        self._heard_at = time.monotonic()

    def send(self, *messages: bytes | str) -> None:
        """Sends messages in order, as one write.

        Raises:
            ConnectionLost: the connection has ended; whether anything arrived is not known.
        """
        with self._lock:
            try:
                for data in messages:
                    if isinstance(data, str):
                        self._protocol.send_text(data.encode("utf-8"))
                    else:
                        self._protocol.send_binary(data)
            except Exception as error:  # the protocol object has one error per state it may be in
                raise ConnectionLost(f"the connection is closed ({error})") from None
            self._write()

    def receive(self, within_s: float | None = None) -> bytes | str:
        """The next message; waits for it, answering and sending pings meanwhile.

        Raises:
            ConnectionLost: the connection has ended, or nothing came within `within_s`.
        """
        while not self._messages:
            try:
                self._socket.settimeout(PING_AFTER_S if within_s is None else within_s)
                data = self._socket.recv(_CHUNK)
            except TimeoutError:
                if within_s is not None:
                    raise ConnectionLost(f"no answer within {within_s:.0f} s") from None
                self._keep_alive()
                continue
            except OSError as error:
                raise ConnectionLost(_reason(error)) from None
            self._heard_at = time.monotonic()
            self._feed(data)
        return self._messages.popleft()

    def finish(self) -> None:
        """Tells the other side that nothing more will come; `receive` ends when it has answered."""
        with self._lock, contextlib.suppress(Exception):  # it may have ended already, in many ways
            self._protocol.send_close(1000)
            self._write()

    def abandon(self) -> None:
        """Ends the connection at once: `receive`, on its thread, raises. Twice is fine."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket; only where no other thread can be inside `receive`."""
        self.abandon()
        self._socket.close()

    def _shake_hands(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._protocol.send_request(self._protocol.connect())
        self._write()
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConnectionLost(f"no WebSocket handshake within {timeout_s:.0f} s")
            self._socket.settimeout(left)
            data = self._socket.recv(_CHUNK)
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            failure = self._protocol.handshake_exc
            if isinstance(failure, InvalidStatus):
                status = failure.response.status_code
                text = f"HTTP status {status} where a WebSocket was asked for"
                if status // 100 == 4 and status not in (408, 425, 429):
                    raise WrongServer(text)
                raise ConnectionLost(text)
            if failure is not None:
                raise ConnectionLost(f"not a WebSocket server ({failure})")
            if not data:
                raise ConnectionLost("the connection was closed during the handshake")
            events = self._protocol.events_received()
            if events:
                self._take(events)
                return

    def _feed(self, data: bytes) -> None:
        with self._lock:
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            events = self._protocol.events_received()
            try:
                self._write()  # pongs, and the answer to a close
            except ConnectionLost:
                if data and not events:
                    raise
        self._take(events)
        if not self._messages and (not data or self._protocol.close_expected()):
            raise ConnectionLost(self._close_text())

    def _take(self, events: list[Any]) -> None:
        for event in events:
            if not isinstance(event, Frame):  # the handshake's response
                continue
            if event.opcode in (Opcode.TEXT, Opcode.BINARY):
                self._text = event.opcode is Opcode.TEXT
                self._parts = [bytes(event.data)]
            elif event.opcode is Opcode.CONT:
                self._parts.append(bytes(event.data))
            else:
                continue
            if event.fin:
                whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts = []
                self._messages.append(whole.decode("utf-8", "replace") if self._text else whole)

    def _write(self) -> None:
        """Writes what the protocol object has to send; call with the lock held."""
        for data in self._protocol.data_to_send():
            try:
                if data:
                    self._write_all(data)
                else:
                    self._socket.shutdown(socket.SHUT_WR)
            except OSError as error:
                raise ConnectionLost(_reason(error)) from None

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        deadline = None
        while view:
            try:
                view = view[self._socket.send(view) :]
            except TimeoutError:  # the other side reads slowly
                deadline = deadline or time.monotonic() + DEAD_AFTER_S
                if time.monotonic() > deadline:
                    raise

    def _keep_alive(self) -> None:
        silent_s = time.monotonic() - self._heard_at
        if silent_s >= DEAD_AFTER_S:
            raise ConnectionLost(f"nothing was heard from the server for {silent_s:.0f} s")
        with self._lock:
            try:
                self._protocol.send_ping(b"")
            except Exception as error:
                raise ConnectionLost(f"the connection is closed ({error})") from None
            self._write()

    def _close_text(self) -> str:
        closed = self._protocol.close_rcvd
        if closed is None:
            return "the server closed the connection"
        return f"the server closed the connection ({closed.code} {closed.reason})".replace(" )", ")")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
