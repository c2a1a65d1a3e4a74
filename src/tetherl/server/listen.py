"""Where a server may listen, with which token, and who may open a connection to it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from tetherl.errors import ConfigError, ServerError
from tetherl.server.config import ExternalConfig

KEEPALIVE_S = 60
"""A peer that is unreachable for about this long is given up, however long a reachable one stays silent."""


def load_token(config: ExternalConfig) -> str | None:
    """The token that clients must send: from `external.token_file`, else TETHERL_TOKEN, else None.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    if config.token_file is None:
        return os.environ.get("TETHERL_TOKEN", "").strip() or None
    path = Path(config.token_file)
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"external.token_file: {path} cannot be read ({error}). Make one with:\n"
            f'  python -c "import secrets; print(secrets.token_urlsafe())" > {path}'
        ) from None
    if not token:
        raise ConfigError(f"external.token_file: {path} is empty; it must hold the token that clients send")
    return token


def check_exposure(address: str, token: str | None, allow_open: bool) -> None:
    """Refuses to listen beyond this machine without a token.

    Raises:
        ConfigError: says what to type.
    """
    if token is not None or allow_open or is_loopback(address):
        return
    raise ConfigError(
        f"external.address: {address} can be reached from other machines, and no token is set: anyone could "
        "join and feed the training. Set a token here and for the clients:\n"
        '  export TETHERL_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe())")\n'
        "or put it in a file and set external.token_file=FILE. To let anyone join: external.allow_open=true"
    )


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address) means this machine only."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bind(address: str, port: int, key: str) -> socket.socket:
    """A listening socket's bound socket. `key` is the setting that holds the port, for the error message.

    Raises:
        ServerError: the port is in use or the address is not of this machine.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ServerError(f"external.address: {address} is not an address to listen on ({error})") from None
    family, kind, proto, _, place = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        if sys.platform != "win32":  # there it would let two servers share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ServerError(
                f"port {port} on {address} is in use, perhaps by another run; "
                f"set {key} to another port, or to 0 for any free one"
            ) from None
        raise ServerError(f"cannot listen on {address} port {port} ({error}); see {key}") from None
    return sock


def url_of(address: str, sock: socket.socket) -> str:
    """ws://address:port/ with the port that the socket got."""
    return ws_url(address, sock.getsockname()[1])


def ws_url(host: str, port: int) -> str:
    return f"ws://[{host}]:{port}/" if ":" in host else f"ws://{host}:{port}/"


def watch_peer(sock: socket.socket) -> None:
    """Lets the kernel find out that the other machine is gone, without asking anything of a busy client."""
    with contextlib.suppress(OSError):  # it is gone already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_S // 2),
            ("TCP_KEEPINTVL", KEEPALIVE_S // 6),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", KEEPALIVE_S * 1000),
        ):
            option = getattr(socket, name, None)
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def refuse_request(request: web.BaseRequest, *, any_origin: bool) -> web.Response | None:
    """The answer to a request that is no WebSocket connection for us; None for one that is.

    Without a token (`any_origin` false), a web page of another host must not reach a server on its visitor's
    own machine: browsers tell such pages by their Origin.
    """
    if request.method != "GET":
        return _line(405, "only WebSocket connections are served here", Allow="GET")
    if request.path != "/":
        return _line(404, "nothing is here; clients connect to /")
    if request.headers.get("Upgrade", "").lower() != "websocket":
        return _line(426, "this is a tetherl server; connect with a client over WebSocket", Upgrade="websocket")
    origin = request.headers.get("Origin")
    if origin is not None and not any_origin and not is_loopback(_host_of(origin)):
        return _line(
            403,
            f"pages of {origin} may not connect: set a token on the server, or open the page from localhost",
        )
    return None


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def _line(status: int, text: str, **headers: str) -> web.Response:
    return web.Response(status=status, text=text + "\n", headers=headers)
