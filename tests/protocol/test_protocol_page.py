"""docs/protocol.md says what the code does: its examples decode, its tables are complete, its client plays."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from websockets.sync.server import serve

from tetherl.protocol.messages import PROTOCOL_VERSION, Act, Action, ClientMessage, Done, Hello, ServerMessage, Welcome
from tetherl.protocol.server_session import ServerSession
from tetherl.protocol.wire import ALLOWED_DTYPES, decode_client, decode_server, decode_value

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
CLIENT_KINDS = {kind.__struct_config__.tag: kind for kind in ClientMessage.__args__}
SERVER_KINDS = {kind.__struct_config__.tag: kind for kind in ServerMessage.__args__}
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_decode(example):
    fields = json.loads(example)
    if fields["type"] in CLIENT_KINDS:
        message = decode_client(example)
    else:
        message = decode_server(example)
        assert fields.keys() <= {"type", *message.__struct_fields__}  # a decoder of clients would let a slip pass
    for part in ("observation", "action", "mask"):
        if part in fields:
            decode_value(getattr(message, part))


def test_each_message_and_field_is_on_the_page():
    for tag, kind in {**CLIENT_KINDS, **SERVER_KINDS}.items():
        assert f"### {tag}\n" in PAGE
        shown = [json.loads(e) for e in EXAMPLES if json.loads(e)["type"] == tag]
        fields = set().union(*(e.keys() for e in shown))
        assert fields == {"type", *kind.__struct_fields__}, tag


def test_error_codes_and_dtypes_are_on_the_page():
    files = [path for part in ("protocol", "server") for path in (ROOT / "src/tetherl" / part).rglob("*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    before = r'(?:code(?:: str)? ?= ?|_Refusal\(\s*|_error\([^,()]*, |_internal\([^"]*?)'
    used = set(re.findall(before + r'"([a-z]+_?[a-z]*)"', source))
    table = set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`[a-z_`, ]+`) \|", PAGE, re.MULTILINE))))
    assert {"bad_message", "bad_token", "wrong_step", "bad_reward", "too_large", "bad_action"} <= used
    assert used <= table
    for dtype in ALLOWED_DTYPES:
        assert f"`{dtype}`" in PAGE
    assert f"version {PROTOCOL_VERSION}\n" in PAGE


def test_the_hexadecimal_vector_is_the_first_act():
    (text,) = re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL)
    message = decode_client(bytes.fromhex(text))
    example = next(e for e in EXAMPLES if json.loads(e)["type"] == "act")
    assert isinstance(message, Act)
    assert message.id == decode_client(example).id
    np.testing.assert_array_equal(decode_value(message.observation), decode_value(decode_client(example).observation))


def test_the_client_on_the_page_plays():
    received = []

    def handle(connection):
        session = ServerSession(token=None, max_episodes=1, max_message_bytes=10_000)
        state = {"phase": "collecting", "policy_version": 0}
        for data in connection:
            message = session.receive(data)
            received.append(message)
            if isinstance(message, Hello):
                spaces = {"observation_space": {}, "action_space": {}, "env_config": {}}
                reply = Welcome(re=message.id, protocol=1, server="t", session="s", worker=1, **spaces, **state)
            elif isinstance(message, Act):
                reply = Action(re=message.id, episode=message.episode, step=message.step, action=message.step, **state)
            else:
                reply = Done(re=message.id, **state)
            connection.send(session.encode(reply))

    program: dict = {}
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(source, "docs/protocol.md", "exec"), program)
    with serve(handle, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert program["play"](*server.socket.getsockname()[:2], steps=3) == [0, 1, 2]
        finally:
            server.shutdown()
            thread.join(30)
    acts = [m for m in received if isinstance(m, Act)]
    assert [(a.step, a.reward) for a in acts] == [(0, 0.0), (1, 1.0), (2, 1.0)]
    np.testing.assert_array_equal(acts[2].observation, np.array([1, 0, 0, 0], np.float32))
    assert received[-1].terminated
