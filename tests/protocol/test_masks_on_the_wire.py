"""The mask of an `act`: optional, checked, and without a trace when it is refused."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from tetherl.protocol.client_session import ClientSession
from tetherl.protocol.messages import Act, Error, Hello, StartEpisode
from tetherl.protocol.server_session import ServerSession
from tetherl.protocol.wire import encode
from tetherl.spaces import ActionCodec

ACTIONS = ActionCodec(spaces.MultiDiscrete([2, 3]))


@pytest.fixture(params=[False, True], ids=["msgpack", "json"])
def say(request):
    session = ServerSession(token=None, max_episodes=1, max_message_bytes=10_000, decode_mask=ACTIONS.mask)
    ids = iter(range(100))

    def send(kind, **fields):
        return session.receive(encode(kind(id=next(ids), **fields), request.param))

    send(Hello, protocol=1)
    send(StartEpisode, episode="e")
    return send


def test_a_mask_arrives_as_booleans(say):
    for step, mask in enumerate(([True, False, True, True, True], np.array([1, 0, 1, 1, 1], np.int8), [1, 0, 1, 1, 1])):
        act = say(Act, episode="e", step=step, observation=0, mask=mask)
        assert isinstance(act, Act) and act.mask.dtype == bool
        assert act.mask.tolist() == [True, False, True, True, True]


def test_without_a_mask_there_is_none(say):
    assert say(Act, episode="e", step=0, observation=0).mask is None
    assert say(Act, episode="e", step=1, observation=0, mask=None).mask is None
    assert b"mask" not in encode(Act(id=1, episode="e", step=0, observation=0))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([True, True], ["(2,)", "(5,)"]),
        ([1, 1, 0, 0, 0], ["forbids every choice of part 1"]),
        ({"a": 1}, ["action mask"]),
        ("all", ["action mask"]),
        ([[1, [1]], 1], ["action mask"]),
        ({"dtype": "bool", "shape": [5], "data": "AAAA"}, ["action mask"]),
    ],
)
def test_a_wrong_mask_is_refused_and_the_step_can_be_sent_again(say, mask, words):
    error = say(Act, episode="e", step=0, observation=0, mask=mask)
    assert isinstance(error, Error) and error.code == "bad_mask" and not error.fatal
    for word in ["episode 'e', step 0", *words]:
        assert word in error.message
    assert isinstance(say(Act, episode="e", step=0, observation=0, mask=[1, 0, 0, 0, 1]), Act)


def test_the_client_session_sends_a_mask_only_when_it_has_one():
    client, server = ClientSession(), ServerSession(token=None, max_episodes=1, max_message_bytes=10_000)
    server.receive(client.hello()[1])
    server.receive(client.start_episode("e")[1])
    _, masked = client.act("e", 0, 0.0, np.array([True, False]))
    act = server.receive(masked)
    assert isinstance(act, Act)
    np.testing.assert_array_equal(act.mask, [True, False])
    assert b"mask" not in client.act("e", 0)[1]
