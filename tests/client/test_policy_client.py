"""PolicyClient against a server with real sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tetherl.client import PolicyClient
from tetherl.errors import (
    ClientError,
    ConfigError,
    DisconnectedError,
    EpisodeLostError,
    RefusedError,
    RequestError,
)
from tetherl.protocol.messages import AbortEpisode, Act, Bye, EndEpisode, Error, LogAction, StartEpisode

OBS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    monkeypatch.delenv("TETHERL_TOKEN", raising=False)


def test_step_form_sends_rewards_with_the_right_step(start_server, eventually):
    server = start_server()
    with PolicyClient(server.url, name="tester") as client:
        for episode in range(2):
            assert client.step(OBS) == 1
            assert client.step(OBS + 1, 0.25) == 1
            assert client.step(OBS + 2, 0.5, terminated=episode == 0, truncated=episode == 1) is None
    starts, acts, ends = server.of_type(StartEpisode), server.of_type(Act), server.of_type(EndEpisode)
    assert [s.episode for s in starts] == [e.episode for e in ends]
    assert starts[0].episode != starts[1].episode
    assert [(a.step, a.reward) for a in acts] == [(0, 0.0), (1, 0.25)] * 2
    np.testing.assert_array_equal(acts[1].observation, OBS + 1)
    assert acts[1].observation.dtype == np.float32
    assert [(e.step, e.reward, e.terminated, e.truncated) for e in ends] == [
        (2, 0.5, True, False),
        (2, 0.5, False, True),
    ]
    np.testing.assert_array_equal(ends[1].observation, OBS + 2)
    eventually(lambda: isinstance(server.received[-1], Bye))


def test_several_episodes_with_logged_actions_and_rewards(start_server):
    server = start_server()
    with PolicyClient(server.url) as client:
        first = client.start_episode("a")
        second = client.start_episode(training_enabled=False)
        assert first == "a"
        assert client.get_action(first, OBS) == 1
        client.log_action(second, OBS, 0)
        client.log_returns(first, 1.0)
        client.log_returns(first, 0.5)  # adds up until the next message
        client.log_returns(second, -1)
        client.log_action(first, OBS, np.int64(1))
        client.get_action(second, OBS)
        client.end_episode(first)  # terminated by default, no observation needed
        client.abort_episode(second, "the game crashed")
    assert [s.training for s in server.of_type(StartEpisode)] == [True, False]
    assert [(m.episode == "a", m.step, m.reward) for m in server.received if isinstance(m, Act | LogAction)] == [
        (True, 0, 0.0),
        (False, 0, 0.0),
        (True, 1, 1.5),
        (False, 1, -1.0),
    ]
    (end,) = server.of_type(EndEpisode)
    assert (end.episode, end.step, end.terminated, end.truncated) == ("a", 2, True, False)
    assert server.of_type(AbortEpisode)[0].reason == "the game crashed"


def test_welcome_is_readable(start_server):
    server = start_server()
    server.env_config = {"level": 3}
    server.policy_version = 7
    with PolicyClient(server.url.removeprefix("ws://")) as client:  # host:port will do
        assert client.connected
        assert client.env_config == {"level": 3}
        assert client.observation_space["shape"] == [4]
        assert client.action_space == {"type": "Discrete", "n": 2}
        assert (client.session, client.worker, client.policy_version) == ("s1", 1, 7)
        assert client.phase == "collecting"
        assert client.resumes_in_s is None


@pytest.mark.parametrize(
    ("space", "sent", "dtype"),
    [
        ({"type": "MultiDiscrete", "nvec": [2, 3]}, np.array([1, 2]), "int64"),
        ({"type": "MultiDiscrete", "nvec": [2, 3]}, [1, 2], "int64"),
        ({"type": "MultiBinary", "n": 2}, np.array([1, 0], np.int8), "int8"),
        (
            {"type": "Box", "low": -1, "high": 1, "shape": [2], "dtype": "float32"},
            np.array([0.5, -1], np.float32),
            "float32",
        ),
    ],
)
def test_actions_other_than_discrete_are_writable_arrays(start_server, space, sent, dtype):
    server = start_server()
    server.action_space, server.action = space, sent
    with PolicyClient(server.url) as client:
        action = client.step(OBS)
    assert isinstance(action, np.ndarray)
    assert action.dtype == dtype
    np.testing.assert_array_equal(action, sent)
    action[0] = 0


def test_refused_request_is_repeatable_and_keeps_its_reward(start_server):
    server = start_server()
    with PolicyClient(server.url) as client:
        episode = client.start_episode()
        client.get_action(episode, OBS)
        client.log_returns(episode, 2.0)
        with pytest.raises(RequestError, match=r"shape \(3,\), expected \(4,\)") as refused:
            client.get_action(episode, OBS[:3])
        assert refused.value.code == "bad_observation"
        assert client.get_action(episode, OBS) == 1
        with pytest.raises(RequestError, match="array of <U4"):
            client.get_action(episode, np.array(["left"]))
        with pytest.raises(RequestError, match="observation after its last action"):
            client.end_episode(episode, truncated=True)
        client.end_episode(episode, OBS, truncated=True)
        with pytest.raises(RequestError, match="not open"):
            client.get_action(episode, OBS)
    assert [(a.step, a.reward) for a in server.of_type(Act)] == [(0, 0.0), (1, 2.0)]


def test_refused_step_can_be_repeated_without_doubling_the_reward(start_server):
    server = start_server()
    with PolicyClient(server.url) as client:
        client.step(OBS)
        with pytest.raises(RequestError):
            client.step(OBS[:2], 3.0)
        client.step(OBS, 3.0)
        with pytest.raises(RequestError):
            client.step(OBS[:2], 4.0, truncated=True)
        assert client.step(OBS, 4.0, truncated=True) is None
        with pytest.raises(RequestError, match="first step"):
            client.step(OBS, 1.0)
    assert [a.reward for a in server.of_type(Act)] == [0.0, 3.0]
    assert [e.reward for e in server.of_type(EndEpisode)] == [4.0]


def test_rewards_are_checked_where_they_are_given(start_server):
    server = start_server()
    with PolicyClient(server.url) as client:
        episode = client.start_episode()
        with pytest.raises(RequestError, match="before any action"):
            client.log_returns(episode, 1.0)
        client.get_action(episode, OBS)
        with pytest.raises(RequestError, match="finite"):
            client.log_returns(episode, float("nan"))


def test_phase_is_pushed_without_a_call(start_server, eventually):
    server = start_server()
    seen: list[str] = []
    with PolicyClient(server.url, on_phase=seen.append) as client:
        eventually(lambda: seen == ["collecting"])
        server.push_phase("learning", 0, 12.5)
        eventually(lambda: seen == ["collecting", "learning"])
        assert client.phase == "learning"
        assert 0 < client.resumes_in_s <= 12.5, "it counts down"
        server.push_phase("collecting", 1)
        eventually(lambda: seen == ["collecting", "learning", "collecting"])
        assert (client.policy_version, client.resumes_in_s) == (1, None)


def test_a_failing_or_requesting_callback_does_not_hurt(start_server, eventually, caplog):
    server = start_server()
    problems: list[str] = []

    def on_phase(phase: str) -> None:
        if phase == "learning":
            try:
                client.start_episode()
            except ClientError as error:
                problems.append(str(error))
            raise ValueError("mine")

    with PolicyClient(server.url, on_phase=on_phase) as client:
        server.push_phase("learning", 0)
        eventually(lambda: bool(problems))
        assert "on_phase must not make requests" in problems[0]
        assert client.step(OBS) == 1
    assert any("on_phase('learning') raised" in record.message for record in caplog.records)


def test_a_held_action_is_waited_for_and_phase_stays_current(start_server, eventually):
    server = start_server()
    with PolicyClient(server.url) as client:
        client.step(OBS)
        server.released.clear()
        result: list[int] = []
        waiting = threading.Thread(target=lambda: result.append(client.step(OBS, 1.0)))
        waiting.start()
        server.push_phase("learning", 0)
        eventually(lambda: client.phase == "learning")
        assert not result
        server.push_phase("collecting", 1)
        server.released.set()
        waiting.join(30)
        assert result == [1]


def test_client_may_start_before_the_server(start_server):
    port = free_port()
    result: list[int] = []

    def play() -> None:
        with PolicyClient(f"ws://127.0.0.1:{port}", connect_timeout_s=60) as client:
            result.append(client.step(OBS))

    player = threading.Thread(target=play)
    player.start()
    time.sleep(1.0)
    start_server(port)
    player.join(60)
    assert result == [1]


def test_no_server_is_said_with_the_reason(start_server):
    url = f"ws://127.0.0.1:{free_port()}"
    with pytest.raises(DisconnectedError, match=r"within 0\.5 s .*refused"):
        PolicyClient(url, connect_timeout_s=0.5)


def test_connecting_in_the_background(start_server):
    port = free_port()
    with PolicyClient(f"ws://127.0.0.1:{port}", connect_timeout_s=None) as client:
        assert not client.connected
        with pytest.raises(DisconnectedError, match="not connected"):
            _ = client.env_config
        start_server(port)
        client.wait_connected(60)
        assert client.connected
        assert client.step(OBS) == 1


def test_server_restart_loses_open_episodes_and_nothing_else(start_server, eventually):
    server = start_server()
    with PolicyClient(server.url) as client:
        idle = client.start_episode()
        busy = client.start_episode()
        client.get_action(busy, OBS)
        client.step(OBS)
        server.kill()
        again = start_server(server.port)
        with pytest.raises(EpisodeLostError, match="start a new episode"):
            client.get_action(busy, OBS)
        fresh = client.start_episode()  # waits for the new connection
        assert client.get_action(fresh, OBS) == 1
        with pytest.raises(EpisodeLostError):
            client.log_returns(busy, 1.0)  # without a message, too
        with pytest.raises(EpisodeLostError):
            client.end_episode(busy)
        with pytest.raises(EpisodeLostError):
            client.get_action(idle, OBS)
        with pytest.raises(EpisodeLostError):
            client.step(OBS, 1.0)
        client.abort_episode(idle)  # nothing to abort any more; silent
        assert client.step(OBS) == 1
        assert client.step(OBS, 1.0, terminated=True) is None
    assert [a.step for a in again.of_type(Act)] == [0, 0]


def test_connection_lost_while_waiting_for_an_action(start_server, eventually):
    server = start_server()
    with PolicyClient(server.url) as client:
        server.released.clear()
        errors: list[Exception] = []

        def play() -> None:
            try:
                client.step(OBS)
            except ClientError as error:
                errors.append(error)

        waiting = threading.Thread(target=play)
        waiting.start()
        eventually(lambda: bool(server.of_type(Act)))
        server.kill()
        waiting.join(30)
        assert isinstance(errors[0], EpisodeLostError)
        start_server(server.port)
        assert client.step(OBS) == 1


def test_server_gone_for_good(start_server, eventually):
    server = start_server()
    with PolicyClient(server.url, reconnect_timeout_s=0.5) as client:
        server.kill()
        eventually(lambda: not client.connected)
        with pytest.raises(DisconnectedError, match=r"within 0\.5 s"):
            client.start_episode()
        start_server(server.port)  # it is still looked for
        eventually(lambda: client.connected)
        client.start_episode()


def test_wrong_and_right_token(start_server, monkeypatch):
    server = start_server(token="secret")
    with pytest.raises(RefusedError, match="a different one came") as refused:
        PolicyClient(server.url, token="wrong")
    assert refused.value.code == "bad_token"
    with pytest.raises(RefusedError, match="none came"):
        PolicyClient(server.url)
    monkeypatch.setenv("TETHERL_TOKEN", "secret")
    with PolicyClient(server.url) as client:
        assert client.step(OBS) == 1


def test_wrong_version_names_both(start_server, monkeypatch):
    server = start_server()
    monkeypatch.setattr("tetherl.protocol.client_session.PROTOCOL_VERSION", 3)
    with pytest.raises(RefusedError, match=r"version 3, the server 1") as refused:
        PolicyClient(server.url)
    assert refused.value.code == "bad_version"


def test_a_full_server_is_tried_again(start_server):
    server = start_server()
    server.refuse_hello = Error(re=0, code="server_full", message="all 2 places are taken", fatal=True)
    with pytest.raises(DisconnectedError, match="all 2 places are taken"):
        PolicyClient(server.url, connect_timeout_s=0.5)
    threading.Timer(0.5, lambda: setattr(server, "refuse_hello", None)).start()
    with PolicyClient(server.url) as client:
        assert client.connected


def test_redirect_is_followed_and_the_door_asked_again_after_a_loss(start_server, eventually):
    first, second = start_server(), start_server()
    door = start_server(redirect=first.url)
    with PolicyClient(door.url) as client:
        client.step(OBS)
        assert first.sessions == 1
        door.redirect = f"ws://0.0.0.0:{second.port}/"  # "this machine": the door's host is meant
        first.kill()
        eventually(lambda: second.sessions == 1)
        with pytest.raises(EpisodeLostError):
            client.step(OBS)
        assert client.step(OBS) == 1
    assert len(second.of_type(Act)) == 1


def test_redirects_in_a_circle_end(start_server):
    door = start_server()
    door.redirect = door.url
    with pytest.raises(DisconnectedError, match="redirects"):
        PolicyClient(door.url, connect_timeout_s=1.0)


def test_request_timeout(start_server):
    server = start_server()
    with PolicyClient(server.url, request_timeout_s=0.5) as client:
        server.released.clear()
        with pytest.raises(DisconnectedError, match="no answer"):
            client.step(OBS)
        server.released.set()
        with pytest.raises(EpisodeLostError):
            client.step(OBS)
        assert client.step(OBS) == 1


def test_close_wakes_a_waiting_call_and_is_final(start_server, eventually):
    server = start_server()
    client = PolicyClient(server.url)
    server.released.clear()
    errors: list[Exception] = []

    def play() -> None:
        try:
            client.step(OBS)
        except ClientError as error:
            errors.append(error)

    waiting = threading.Thread(target=play)
    waiting.start()
    eventually(lambda: bool(server.of_type(Act)))
    client.close()
    waiting.join(30)
    assert isinstance(errors[0], DisconnectedError)
    server.released.set()
    client.close()
    for call in (client.start_episode, lambda: client.step(OBS)):
        with pytest.raises(DisconnectedError, match="closed"):
            call()
    assert not [t for t in threading.enumerate() if t.name == "tetherl-client"]


def test_calls_from_several_threads(start_server):
    server = start_server()
    with PolicyClient(server.url) as client:
        failures: list[BaseException] = []

        def play() -> None:
            try:
                episode = client.start_episode()
                for _ in range(50):
                    assert client.get_action(episode, OBS) == 1
                client.end_episode(episode)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=play) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert len(server.of_type(Act)) == 200


def test_silence_is_met_with_pings_and_ends_when_they_stay_unanswered(start_server, monkeypatch, eventually):
    monkeypatch.setattr("tetherl.client.transport.PING_AFTER_S", 0.1)
    monkeypatch.setattr("tetherl.client.transport.DEAD_AFTER_S", 3.0)
    server = start_server()
    with PolicyClient(server.url) as client:
        time.sleep(4.0)  # longer than the deadline: only answered pings explain that it lives
        assert client.connected
        assert server.sessions == 1
        assert client.step(OBS) == 1
    with socket.socket() as mute:  # takes the connection, never says a word
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(DisconnectedError):
            PolicyClient(f"ws://127.0.0.1:{mute.getsockname()[1]}", connect_timeout_s=0.5)


def test_something_else_at_the_address(start_server):
    server = start_server()
    with pytest.raises(ConfigError, match="ws://host:port"):
        PolicyClient("ftp://somewhere")
    with pytest.raises(ConfigError):
        PolicyClient("ws://host:port")
    server.kill()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def serve_404() -> None:
            connection, _ = other.accept()
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            connection.close()

        threading.Thread(target=serve_404, daemon=True).start()
        with pytest.raises(RefusedError, match="404"):
            PolicyClient(f"http://127.0.0.1:{other.getsockname()[1]}")


def test_environment_proxies_are_not_used(start_server, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with PolicyClient(start_server().url) as client:
        assert client.connected


def test_importing_the_client_loads_nothing_heavy():
    program = (
        "import sys, tetherl.client; from tetherl.client import PolicyClient; "
        "loaded = {name.split('.')[0] for name in sys.modules}; "
        "heavy = {'torch', 'gymnasium', 'aiohttp', 'asyncio', 'fcntl', 'resource'}; "
        "print(sorted(loaded & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_masks_travel_with_the_step_that_they_are_for(start_server):
    server = start_server()
    with PolicyClient(server.url) as client:
        client.step(OBS, action_mask=[True, False])
        client.step(OBS, 1.0)
        client.step(OBS, 1.0, action_mask=np.array([0, 1], np.int8))
        client.step(OBS, 1.0, terminated=True, action_mask=[False, False])  # nothing is asked for any more
        episode = client.start_episode()
        client.get_action(episode, OBS, action_mask=(1, 1))
    masks = [None if act.mask is None else np.asarray(act.mask).tolist() for act in server.of_type(Act)]
    assert masks == [[True, False], None, [0, 1], [1, 1]]


def test_actions_of_parts_come_as_dicts_and_tuples(start_server):
    server = start_server()
    box = {"type": "Box", "low": -1, "high": 1, "shape": [2], "dtype": "float32"}
    inner = {"type": "Tuple", "spaces": [{"type": "Discrete", "n": 3}, {"type": "MultiBinary", "n": 2}]}
    server.action_space = {"type": "Dict", "spaces": {"aim": box, "more": inner}}
    server.action = {"more": (2, np.array([0, 1], np.int8)), "aim": np.array([0.5, -1], np.float32)}
    with PolicyClient(server.url) as client:
        action = client.step(OBS)
        assert list(action) == ["aim", "more"]
        assert action["aim"].dtype == np.float32 and action["aim"].tolist() == [0.5, -1]
        number, bits = action["more"]
        assert type(number) is int and number == 2 and bits.dtype == np.int8
        for broken in ({"aim": [0, 0]}, {"aim": [0, 0], "more": [1]}, 3):
            server.action = broken
            with pytest.raises(RequestError, match="cannot be read"):
                client.step(OBS, 1.0)
            server.action = {"more": (2, [0, 1]), "aim": [0, 0]}
