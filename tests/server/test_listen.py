"""Where a server may listen, and with which token."""

from __future__ import annotations

import socket

import pytest

from tetherl.errors import ConfigError, ServerError
from tetherl.server.front_door import FrontDoor
from tetherl.server.listen import bind, check_exposure, is_loopback, load_token, url_of
from tetherl.server.policy_server import PolicyServer


def test_the_token_comes_from_the_file_then_from_the_environment(config, tmp_path, monkeypatch):
    monkeypatch.delenv("TETHERL_TOKEN", raising=False)
    assert load_token(config()) is None
    monkeypatch.setenv("TETHERL_TOKEN", "from-env")
    assert load_token(config()) == "from-env"
    path = tmp_path / "token"
    path.write_text("from-file\n")
    assert load_token(config(token_file=str(path))) == "from-file"


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_token_file_without_token_is_an_error(config, tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"external\.token_file.*token"):
        load_token(config(token_file=str(path)))


def test_loopback():
    for host in ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "LOCALHOST."):
        assert is_loopback(host)
    for host in (
        "0.0.0.0",
        "::",
        "",
        "10.0.0.1",
        "example.org",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
    ):
        assert not is_loopback(host)


def test_case_032_listening_beyond_loopback_needs_a_token(config, fake_policy):
    for address in ("0.0.0.0", "::", "192.168.1.2"):
        with pytest.raises(ConfigError, match=r"(?s)export TETHERL_TOKEN=.*external\.allow_open"):
            check_exposure(address, None, False)
        check_exposure(address, "token", False)
        check_exposure(address, None, True)
    server = PolicyServer(fake_policy(), config(address="0.0.0.0"), worker=1, worker_port=0, token=None)
    with pytest.raises(ConfigError, match="no token is set"):
        server.start()
    server.stop()
    door = FrontDoor("0.0.0.0", 0, None, [])
    with pytest.raises(ConfigError, match="no token is set"):
        door.start()
    door.stop()


def test_a_port_in_use_names_port_and_key(config, fake_policy):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = PolicyServer(fake_policy(), config(), worker=1, worker_port=port, token=None)
        with pytest.raises(ServerError, match=rf"port {port}.*in use.*external\.worker_port"):
            server.start()
        server.stop()
        door = FrontDoor("127.0.0.1", port, None, [])
        with pytest.raises(ServerError, match=rf"port {port}.*in use.*external\.port"):
            door.start()
        door.stop()


def test_an_address_of_another_machine(config):
    with pytest.raises(ServerError, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 0, "external.port")


def test_urls():
    for address, start in (("127.0.0.1", "ws://127.0.0.1:"), ("localhost", "ws://localhost:")):
        with bind(address, 0, "external.port") as sock:
            assert url_of(address, sock) == f"{start}{sock.getsockname()[1]}/"


def test_case_016_a_port_can_be_bound_again_at_once(serve, join, until):
    server, url = serve()
    port = int(url.rsplit(":", 1)[1].strip("/"))
    client = join(url)
    client.start()
    server.stop()
    assert client.closed() == (1001, "server stopped")
    _, again = serve(server={"worker_port": port})
    assert again == url and join(again).welcome["session"]
