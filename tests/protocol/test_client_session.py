"""The client's half of a session, alone and against the server's half."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from tetherl.protocol.client_session import ClientSession
from tetherl.protocol.messages import Act, Action, Done, Error, Hello, PhaseChange, Redirect, Welcome
from tetherl.protocol.server_session import ServerSession
from tetherl.protocol.wire import WireError, decode_client, encode

STATE = {"phase": "collecting", "policy_version": 4, "resumes_in_s": None}


def welcome(re=0, **changes):
    fields = {
        "protocol": 1,
        "server": "test",
        "session": "s",
        "worker": 2,
        "observation_space": {},
        "action_space": {},
        "env_config": {},
    }
    return Welcome(re=re, **{**fields, **STATE, **changes})


def greeted() -> ClientSession:
    session = ClientSession()
    session.hello()
    session.receive(encode(welcome()))
    return session


def test_hello_and_welcome():
    session = ClientSession(token="t", name="n", purpose="evaluate")
    request_id, data = session.hello()
    hello = decode_client(data)
    assert hello == Hello(id=request_id, protocol=1, token="t", name="n", purpose="evaluate")
    answered, message = session.receive(encode(welcome(request_id, phase="learning", resumes_in_s=3.0)))
    assert answered == request_id
    assert session.welcome == message
    assert (session.phase, session.policy_version, session.resumes_in_s) == ("learning", 4, 3.0)


def test_ids_and_steps_count_and_state_follows_every_message():
    session = greeted()
    first, _ = session.start_episode("e", False)
    session.receive(encode(Done(re=first, **STATE)))
    seen = []
    for step in range(3):
        request_id, data = session.act("e", [1.0], 0.0)
        assert decode_client(data).step == step
        seen.append(request_id)
        answer = Action(
            re=request_id, episode="e", step=step, action=1, phase="learning", policy_version=step, resumes_in_s=9.0
        )
        assert session.receive(encode(answer)) == (request_id, answer)
        assert (session.phase, session.policy_version) == ("learning", step)
    assert seen == [first + 1, first + 2, first + 3]
    assert session.open_episodes == {"e": 3}
    answered, _ = session.receive(encode(PhaseChange(phase="collecting", policy_version=8)))
    assert answered is None
    assert (session.phase, session.policy_version, session.resumes_in_s) == ("collecting", 8, None)
    end, data = session.end_episode("e", None, 1.0, terminated=True, truncated=False)
    assert decode_client(data).step == 3
    session.receive(encode(Done(re=end, **STATE)))
    assert session.open_episodes == {}


def test_a_refusal_does_not_advance():
    session = greeted()
    session.receive(encode(Done(re=session.start_episode("e")[0], **STATE)))
    request_id, _ = session.act("e", [1.0])
    answered, error = session.receive(encode(Error(re=request_id, code="bad_observation", message="no")))
    assert answered == request_id
    assert isinstance(error, Error)
    assert decode_client(session.act("e", [1.0])[1]).step == 0


def test_an_error_without_id_means_the_oldest_request():
    session = greeted()
    request_id, _ = session.start_episode("e")
    session.start_episode("f")
    assert session.receive(encode(Error(re=None, code="bad_message", message="?")))[0] == request_id
    assert session.receive(encode(Error(re=None, code="x", message="over", fatal=True)))[0] is None
    assert greeted().receive(encode(Error(re=None, code="x", message="?")))[0] is None


def test_what_cannot_travel_uses_no_id():
    session = greeted()
    before, _ = session.start_episode("e")
    with pytest.raises(TypeError, match="cannot travel"):
        session.act("e", object())
    assert session.bye()[0] == before + 1


@pytest.mark.parametrize(
    "answer",
    [
        Done(re=99, **STATE),
        Done(re=2, **STATE),  # to an act
        Action(re=2, episode="other", step=0, action=1, **STATE),
        Action(re=2, episode="e", step=1, action=1, **STATE),
        Action(re=1, episode="e", step=0, action=1, **STATE),  # to start_episode
        Redirect(re=1, url="ws://elsewhere"),
        welcome(1),
    ],
)
def test_answers_that_fit_no_request(answer):
    session = greeted()
    assert session.start_episode("e")[0] == 1
    assert session.act("e", [0.0])[0] == 2  # without waiting: the answers come in order
    with pytest.raises(WireError):
        session.receive(encode(answer))


@pytest.mark.parametrize("as_json", [False, True])
def test_both_halves_agree_over_random_play(as_json):
    """Any order of valid and invalid requests leaves both halves with the same books."""
    rng = random.Random(3)

    def decode_observation(value):
        if np.asarray(value).shape != (2,):
            raise ValueError("shape")
        return value

    server = ServerSession(token=None, max_episodes=3, max_message_bytes=10_000, decode_observation=decode_observation)
    client = ClientSession(as_json=as_json)
    errors = 0

    def exchange(request):
        nonlocal errors
        request_id, data = request
        message = server.receive(data)
        if isinstance(message, Error):
            errors += 1
            reply = message
        elif isinstance(message, Hello):
            reply = welcome(message.id)
        elif isinstance(message, Act):
            reply = Action(re=message.id, episode=message.episode, step=message.step, action=1, **STATE)
        else:
            reply = Done(re=message.id, **STATE)
        assert client.receive(server.encode(reply))[0] == request_id

    exchange(client.hello())
    for _ in range(500):
        episode = rng.choice("abcd")
        observation = np.zeros(rng.choice([2, 2, 2, 3]), np.float32)
        kind = rng.randrange(6)
        if kind == 0:
            exchange(client.start_episode(episode))
        elif kind in (1, 2):
            exchange(client.act(episode, observation))
        elif kind == 3:
            exchange(client.log_action(episode, observation, 1))
        elif kind == 4:
            over = rng.random() < 0.5
            exchange(client.end_episode(episode, observation, 0.0, terminated=over, truncated=not over))
        else:
            exchange(client.abort_episode(episode))
        assert client.open_episodes == server.open_episodes
    assert 50 < errors < 450


def test_garbage_from_a_server_is_a_wire_error():
    rng = random.Random(5)
    text = encode(welcome(), True)
    for _ in range(500):
        session = ClientSession()
        session.hello()
        at = rng.randrange(len(text))
        try:
            session.receive(text[:at] + rng.choice('"{}[],:x0') + text[at + rng.randint(0, 3) :])
        except WireError:
            continue
    assert json.loads(text)["worker"] == 2
