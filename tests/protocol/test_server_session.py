"""The server's half of a session: every rule, and bytes from hell."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from tetherl.protocol.messages import AbortEpisode, Act, Bye, EndEpisode, Error, Hello, LogAction, StartEpisode
from tetherl.protocol.server_session import ServerSession
from tetherl.protocol.wire import WireError, decode_server, encode

OBS = np.zeros(3, np.float32)


def decode_observation(value):
    array = np.asarray(value)
    if array.shape != (3,) or array.dtype.kind not in "fi":
        raise ValueError(f"shape {array.shape}, dtype {array.dtype}; expected (3,) of numbers")
    if not np.isfinite(array).all():
        raise ValueError("not finite")
    return {"": array.astype(np.float32)}


def decode_action(value):
    if value not in (0, 1):
        raise ValueError(f"action {value!r} is not 0 or 1")
    return np.array([value])


class Talk:
    """A session and a client's counter of ids."""

    def __init__(self, *, greet=True, as_json=False, **settings):
        defaults = {
            "token": None,
            "max_episodes": 2,
            "max_message_bytes": 10_000,
            "decode_observation": decode_observation,
            "decode_action": decode_action,
        }
        self.session = ServerSession(**{**defaults, **settings})
        self.as_json = as_json
        self.next_id = 0
        if greet:
            assert isinstance(self.say(Hello, protocol=1), Hello)

    def say(self, kind, **fields):
        message = kind(id=self.next_id, **fields)
        self.next_id += 1
        return self.session.receive(encode(message, self.as_json))

    def refused(self, code, kind, fatal=False, **fields):
        before = dict(self.session.open_episodes)
        error = self.say(kind, **fields)
        assert isinstance(error, Error)
        assert (error.code, error.fatal, error.re) == (code, fatal, self.next_id - 1), error
        assert self.session.closed is fatal
        assert self.session.open_episodes == before
        assert decode_server(self.session.encode(error)) == error
        return error.message


@pytest.mark.parametrize("as_json", [False, True])
def test_an_episode_from_start_to_end(as_json):
    talk = Talk(as_json=as_json)
    assert talk.session.as_json is as_json
    assert isinstance(talk.session.encode(Error(re=None, code="x", message="y")), str) is as_json
    assert isinstance(talk.say(StartEpisode, episode="e"), StartEpisode)
    act = talk.say(Act, episode="e", step=0, observation=OBS + 1)
    assert isinstance(act, Act)
    np.testing.assert_array_equal(act.observation[""], OBS + 1)
    logged = talk.say(LogAction, episode="e", step=1, observation=[1, 2, 3], action=1, reward=0.5)
    assert isinstance(logged, LogAction)
    assert (logged.reward, logged.action.tolist(), logged.observation[""].tolist()) == (0.5, [1], [1, 2, 3])
    assert talk.session.open_episodes == {"e": 2}
    end = talk.say(EndEpisode, episode="e", step=2, reward=1.0, observation=OBS, truncated=True)
    assert isinstance(end, EndEpisode)
    assert end.observation[""].shape == (3,)
    assert talk.session.open_episodes == {}
    assert isinstance(talk.say(StartEpisode, episode="e"), StartEpisode)  # its name is free again
    assert isinstance(talk.say(AbortEpisode, episode="e"), AbortEpisode)
    assert not talk.session.closed
    assert isinstance(talk.say(Bye), Bye)
    assert talk.session.closed
    assert talk.say(StartEpisode, episode="f").fatal


def test_hello_fields():
    talk = Talk(greet=False)
    talk.say(Hello, protocol=1, name="level 3", purpose="evaluate")
    assert (talk.session.greeted, talk.session.name, talk.session.purpose) == (True, "level 3", "evaluate")
    assert "already" in talk.refused("bad_message", Hello, protocol=1)


def test_nothing_before_hello():
    assert "first message must be hello" in Talk(greet=False).refused("not_greeted", Bye, fatal=True)
    talk = Talk(greet=False)
    error = talk.session.receive(b"GET / HTTP/1.1")
    assert error.fatal
    assert talk.session.closed


@pytest.mark.parametrize("token", ["wrong", "", None, "secret ", "s\u00e9cret"])
def test_token(token):
    assert "token" in Talk(greet=False, token="secret").refused("bad_token", Hello, True, protocol=1, token=token)
    assert isinstance(Talk(greet=False, token="secret").say(Hello, protocol=1, token="secret"), Hello)
    assert isinstance(Talk(greet=False).say(Hello, protocol=1, token="not asked for"), Hello)


def test_the_right_token_is_in_no_message():
    assert "s3cret" not in Talk(greet=False, token="s3cret").refused(
        "bad_token", Hello, True, protocol=1, token="s3cre"
    )


@pytest.mark.parametrize(("version", "who"), [(0, "client"), (2, "server")])
def test_version_is_named_on_both_sides(version, who):
    text = Talk(greet=False).refused("bad_version", Hello, fatal=True, protocol=version)
    assert f"version {version}" in text
    assert "server 1" in text
    assert f"update the {who}" in text


def test_version_is_named_even_if_the_hello_looks_different():
    talk = Talk(greet=False)
    error = talk.session.receive('{"type":"hello","id":4,"protocol":9,"capabilities":["lz4"]}')
    assert (error.code, error.re, error.fatal) == ("bad_version", 4, True)
    assert "version 9" in error.message


def test_episode_rules():
    talk = Talk()
    assert "'e' is not open" in talk.refused("unknown_episode", Act, episode="e", step=0, observation=OBS)
    talk.refused("unknown_episode", EndEpisode, episode="e", step=0, terminated=True)
    talk.refused("unknown_episode", AbortEpisode, episode="e")
    talk.say(StartEpisode, episode="e")
    assert "already open" in talk.refused("episode_exists", StartEpisode, episode="e")
    talk.say(StartEpisode, episode="f")
    assert "max_episodes_per_session" in talk.refused("too_many_episodes", StartEpisode, episode="g")


def test_steps_count_and_a_refused_act_can_be_sent_again():
    talk = Talk()
    talk.say(StartEpisode, episode="e")
    talk.say(Act, episode="e", step=0, observation=OBS)
    for step in (0, 2, 7):
        text = talk.refused("wrong_step", Act, episode="e", step=step, observation=OBS)
        assert f"carries step {step}, expected 1" in text
    talk.refused("wrong_step", EndEpisode, episode="e", step=2, terminated=True)
    talk.refused("bad_observation", Act, episode="e", step=1, observation=[1, 2])
    assert isinstance(talk.say(Act, episode="e", step=1, observation=OBS), Act)
    assert talk.session.open_episodes == {"e": 2}


@pytest.mark.parametrize(
    "observation", [None, [1, 2], "x", {"a": 1}, [1, 2, [3]], [float("nan")] * 3, np.full(3, np.nan), b"raw"]
)
def test_bad_observations(observation):
    talk = Talk()
    talk.say(StartEpisode, episode="e")
    assert talk.refused("bad_observation", Act, episode="e", step=0, observation=observation).startswith("observation")
    talk.refused("bad_observation", LogAction, episode="e", step=0, observation=observation, action=0)
    if observation is not None:
        talk.refused("bad_observation", EndEpisode, episode="e", step=0, observation=observation, terminated=True)


def test_bad_action():
    talk = Talk()
    talk.say(StartEpisode, episode="e")
    for action in (2, None, "left", {}):
        text = talk.refused("bad_action", LogAction, episode="e", step=0, observation=OBS, action=action)
        assert text.startswith("action")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_bad_rewards(reward):
    talk = Talk()
    talk.say(StartEpisode, episode="e")
    talk.say(Act, episode="e", step=0, observation=OBS)
    talk.refused("bad_reward", Act, episode="e", step=1, observation=OBS, reward=reward)
    talk.refused("bad_reward", EndEpisode, episode="e", step=1, terminated=True, reward=reward)


def test_a_reward_before_any_action():
    talk = Talk()
    talk.say(StartEpisode, episode="e")
    assert "before any action" in talk.refused("bad_reward", Act, episode="e", step=0, observation=OBS, reward=1.0)


def test_how_an_episode_may_end():
    talk = Talk()
    talk.say(StartEpisode, episode="e")
    talk.refused("bad_message", EndEpisode, episode="e", step=0, observation=OBS)
    assert "after its last action" in talk.refused("bad_observation", EndEpisode, episode="e", step=0, truncated=True)
    both = talk.say(EndEpisode, episode="e", step=0, terminated=True, truncated=True)  # termination wins
    assert isinstance(both, EndEpisode)


def test_ids_must_increase_and_are_used_up_by_refusals():
    talk = Talk()
    session = talk.session
    assert isinstance(session.receive('{"type":"start_episode","id":5,"episode":"e"}'), StartEpisode)
    error = session.receive('{"type":"abort_episode","id":5,"episode":"e"}')
    assert (error.code, error.re) == ("bad_message", 5)
    error = session.receive('{"type":"abort_episode","id":9,"episode":17}')
    assert (error.code, error.re, error.fatal) == ("bad_message", 9, False)
    assert session.receive('{"type":"abort_episode","id":9,"episode":"e"}').code == "bad_message"
    assert isinstance(session.receive('{"type":"abort_episode","id":10,"episode":"e"}'), AbortEpisode)


def test_size_is_checked_before_reading():
    talk = Talk(max_message_bytes=100)
    error = talk.session.receive(b"\xff" * 101)
    assert (error.code, error.fatal) == ("too_large", False)
    assert "101 bytes; at most 100" in error.message
    stranger = Talk(greet=False, max_message_bytes=10)
    assert stranger.session.receive(b"\xff" * 11).fatal


def test_pickle_is_refused():
    class Trap:
        def __reduce__(self):
            return (print, ("ran",))

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        error = Talk().session.receive(pickle.dumps([1, {"type": "bye"}], protocol))
        assert error.code == "bad_message"


def test_a_defect_in_a_codec_is_told_and_survived(caplog):
    def broken(value):
        raise KeyError("oops")

    talk = Talk(decode_observation=broken)
    talk.say(StartEpisode, episode="e")
    talk.refused("internal", Act, episode="e", step=0, observation=OBS)
    assert "could not be checked" in caplog.text


def seeds() -> list[bytes | str]:
    vectors = json.loads((Path(__file__).parents[1] / "data" / "protocol_vectors.json").read_text())
    messages: list[bytes | str] = [bytes.fromhex(v["msgpack"]) for v in vectors]
    messages += [json.dumps(v["json"]) for v in vectors]
    for as_json in (False, True):
        messages += [
            encode(Act(id=9, episode="e", step=0, observation=OBS), as_json),
            encode(Act(id=9, episode="e", step=0, observation=[0.5, 1.0, 2.0]), as_json),
            encode(LogAction(id=9, episode="e", step=0, observation=OBS, action=1), as_json),
            encode(EndEpisode(id=9, episode="e", step=0, observation=OBS, truncated=True), as_json),
        ]
    return messages


JSON_PIECES = [
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\\",
    "\\ud800",
    "9" * 400,
    "1e308",
    "-0",
    "null",
    "true",
    "\x00",
    "é",
]


def mutate(rng: random.Random, data: bytes | str, others: list[bytes | str]) -> bytes | str:
    is_text = isinstance(data, str)
    for _ in range(rng.randint(0, 3)):
        at = rng.randint(0, len(data))
        kind = rng.randrange(5)
        if is_text:
            piece = rng.choice([*JSON_PIECES, chr(rng.randint(0, 0x2FFF))])
        else:
            piece = bytes(rng.choices([*range(256), 0xDD, 0xDF, 0xC6, 0xC9, 0xD9], k=rng.randint(1, 5)))
        if kind == 0:
            data = data[:at] + piece + data[at:]
        elif kind == 1:
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == 2:
            data = data[:at] + data[at + rng.randint(1, 8) :]
        elif kind == 3:
            data = data[:at]
        else:
            other = rng.choice(others)
            if isinstance(other, str) is is_text:
                data = data[:at] + other[rng.randint(0, len(other)) :]
    if rng.random() < 0.05:
        return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data.decode("latin-1")
    return data


def test_mutated_bytes_give_messages_or_errors_and_nothing_else():
    rng = random.Random(20240)
    originals = seeds()
    accepted = refused = 0
    for round_ in range(1200):
        talk = Talk(greet=False, token="secret") if round_ % 4 == 0 else Talk()
        if talk.session.greeted:
            talk.say(StartEpisode, episode="e")
        for _ in range(5):
            before = dict(talk.session.open_episodes)
            result = talk.session.receive(mutate(rng, rng.choice(originals), originals))
            if isinstance(result, Error):
                refused += 1
                assert talk.session.open_episodes == before
                assert result.fatal is talk.session.closed
                assert len(result.message) < 1000
                assert decode_server(talk.session.encode(result)) == result
            else:
                accepted += 1
                assert isinstance(result, Hello | StartEpisode | Act | LogAction | EndEpisode | AbortEpisode | Bye)
            assert len(talk.session.open_episodes) <= 2
    assert accepted > 100  # else the mutations were too wild to test much
    assert refused > 1000


def test_random_bytes():
    rng = random.Random(7)
    for _ in range(2000):
        talk = Talk()
        result = talk.session.receive(rng.randbytes(rng.randint(0, 60)))
        assert isinstance(result, Error)
        with pytest.raises(WireError):
            decode_server(rng.randbytes(rng.randint(0, 60)))
