"""Playing a Gymnasium environment as a client, from Python and from the command line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tetherl.cli import client as command
from tetherl.client.envloop import Player, make_env, play
from tetherl.errors import ConfigError, RefusedError, RequestError
from tetherl.protocol.messages import AbortEpisode, Act, EndEpisode, StartEpisode


class CountingEnv:
    """Shows the step number; odd episodes end by themselves, even ones are cut. Reward: the step number."""

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.closed = False
        self.episode = 0
        self.seeds: list[int | None] = []

    def _observe(self) -> np.ndarray:
        return np.array([self.t, self.episode, 0, 0], np.float32)

    def reset(self, seed=None):
        self.seeds.append(seed)
        self.episode += 1
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        assert action == 1
        self.t += 1
        over = self.t == self.length
        return self._observe(), float(self.t), over and self.episode % 2 == 1, over and self.episode % 2 == 0, {}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    monkeypatch.delenv("TETHERL_TOKEN", raising=False)


def test_every_step_and_reward_arrives(start_server):
    server = start_server()
    env = CountingEnv()
    stats = play(lambda: env, server.url, episodes=4, seed=11)
    assert (stats.episodes, stats.steps, stats.episode_return_mean, stats.ended) == (4, 12, 6.0, "episodes")
    assert stats.actions == 12
    assert 0 < stats.longest_wait_s <= stats.wait_sum_s
    assert env.closed
    assert env.seeds == [11, None, None, None]
    assert [(a.step, a.reward, a.observation[0]) for a in server.of_type(Act)] == [(0, 0, 0), (1, 1, 1), (2, 2, 2)] * 4
    ends = server.of_type(EndEpisode)
    assert [(e.step, e.reward, e.terminated, e.truncated) for e in ends] == [
        (3, 3.0, True, False),
        (3, 3.0, False, True),
    ] * 2
    assert all(e.observation[0] == 3 for e in ends)


def test_env_config_of_the_server_and_overrides(start_server):
    server = start_server()
    server.env_config = {"length": 5}
    assert play(CountingEnv, server.url, episodes=1).steps == 5
    assert play(CountingEnv, server.url, episodes=1, env_config={"length": 2}).steps == 2


def test_steps_end_in_the_middle_of_an_episode(start_server):
    server = start_server()
    stats = play(CountingEnv, server.url, steps=5)
    assert (stats.steps, stats.episodes, stats.ended) == (5, 1, "steps")
    assert len(server.of_type(AbortEpisode)) == 1


def test_actions_while_learning_and_phases_are_counted(start_server):
    server = start_server()
    server.phase = "learning"
    player = Player(CountingEnv, server.url, episodes=2)
    stats = player.run()
    assert stats.actions_while_learning == stats.actions == 6
    assert stats.phases == ["learning"]


def test_goes_on_after_a_server_restart(start_server, eventually):
    server = start_server()
    player = Player(lambda: CountingEnv(1000), server.url)
    thread = threading.Thread(target=player.run)
    thread.start()
    eventually(lambda: player.stats.steps > 5)
    server.kill()
    again = start_server(server.port)
    eventually(lambda: len(again.of_type(Act)) > 5)
    assert player.stats.episodes_lost == 1
    assert again.of_type(Act)[0].step == 0
    assert again.of_type(Act)[0].observation[0] == 0  # the environment was reset
    player.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert player.stats.ended == "asked to stop"


@pytest.mark.parametrize("held", [False, True])
def test_ends_when_the_server_stops(start_server, eventually, held):
    server = start_server()
    player = Player(lambda: CountingEnv(1000), server.url)
    thread = threading.Thread(target=player.run)
    thread.start()
    eventually(lambda: player.stats.steps > 2)
    if held:
        server.released.clear()
    server.push_phase("stopped", 3)
    thread.join(30)
    assert not thread.is_alive()
    assert player.stats.ended == "server stopped"
    assert "stopped" in player.stats.phases
    server.released.set()


def test_a_refusal_just_before_the_news_of_the_stop_is_no_failure(start_server, eventually):
    server = start_server()
    player = Player(lambda: CountingEnv(1000), server.url)
    errors: list[Exception] = []

    def run() -> None:
        try:
            player.run()
        except RequestError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: player.stats.steps > 2)
    server.refuse_act = "not_ready"
    time.sleep(0.3)
    server.push_phase("stopped", 3)
    thread.join(30)
    assert not errors
    assert player.stats.ended == "server stopped"


def test_stop_ends_waiting_for_a_server():
    player = Player(CountingEnv, "ws://127.0.0.1:9")
    thread = threading.Thread(target=player.run)
    thread.start()
    time.sleep(0.3)
    player.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert player.stats.ended == "asked to stop"


def test_failures_reach_the_caller(start_server):
    server = start_server(token="t")
    with pytest.raises(RefusedError):
        play(CountingEnv, server.url)
    server.token = None

    class Broken(CountingEnv):
        def step(self, action):
            raise ZeroDivisionError("physics")

    with pytest.raises(ZeroDivisionError):
        play(Broken, server.url)
    assert server.of_type(AbortEpisode)[0].reason == "ZeroDivisionError: physics"

    class Misfit(CountingEnv):
        def _observe(self):
            return np.zeros(5, np.float32)

    with pytest.raises(RequestError, match=r"shape \(5,\)"):
        play(Misfit, server.url)


def test_environments_by_name(monkeypatch, tmp_path):
    (tmp_path / "my_envs_for_client.py").write_text("class Env:\n    def __init__(self, size=1): self.size = size\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert make_env("my_envs_for_client:Env", {"size": 4}).size == 4
    with pytest.raises(ConfigError, match="module:Name"):
        make_env("my_envs_for_client:Missing", {})
    make_env("CartPole-v1", {}).close()
    with pytest.raises(ConfigError, match="NoSuchEnv"):
        make_env("NoSuchEnv-v0", {})
    with pytest.raises(ConfigError, match="wheels"):
        make_env("CartPole-v1", {"wheels": 5})


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["client", *arguments])


def test_command_plays_and_reports(start_server, capsys, tmp_path):
    server = start_server(token="from the file")
    token_file = tmp_path / "token"
    token_file.write_text("from the file\n")
    arguments = ["--env", "CartPole-v1", "--connect", server.url, "--envs", "2", "--episodes", "2", "--seed", "5"]
    args = parse(*arguments, "--token-file", str(token_file), "--json", "--quiet")
    assert command.run(args) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["episodes"] == 4
    assert [copy["episodes"] for copy in document["copies"]] == [2, 2]
    assert document["steps"] == len(server.of_type(Act)) == document["actions"]
    assert document["episode_return_mean"] == document["steps"] / 4
    assert document["actions_while_learning"] == 0
    assert document["longest_wait_s"] > 0
    assert document["ended"] == "episodes"
    assert server.sessions == 2
    first = [server.received.index(s) for s in server.of_type(StartEpisode)]
    assert len(first) == 4

    assert command.run(parse(*arguments, "--token-file", str(token_file), "--quiet")) == 0
    out = capsys.readouterr().out
    assert "4 episodes" in out
    assert "ended after" in out


def test_command_says_why_it_failed(start_server, capsys, tmp_path):
    server = start_server(token="t")
    args = parse("--env", "CartPole-v1", "--connect", server.url, "--json")
    assert command.run(args) == 1
    output = capsys.readouterr()
    assert "token" in json.loads(output.out)["errors"][0]
    assert "RefusedError" in output.err
    with pytest.raises(ConfigError, match="cannot be read"):
        command.run(parse("--env", "X", "--connect", "h:1", "--token-file", str(tmp_path / "none")))
    for bad in (["--envs", "0"], ["--env-config", "[1]"], ["--env-config", "{"]):
        with pytest.raises(SystemExit):
            parse("--env", "X", "--connect", "h:1", *bad)


PROGRAM = "import sys, argparse; from tetherl.cli import client as c; p = argparse.ArgumentParser(); "
PROGRAM += "c.add_parser(p.add_subparsers()); sys.exit(c.run(p.parse_args()))"


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "stopped"])
def test_command_ends_cleanly(start_server, eventually, end):
    server = start_server()
    command_line = [sys.executable, "-c", PROGRAM, "client", "--env", "CartPole-v1", "--connect", server.url]
    process = subprocess.Popen([*command_line, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: len(server.of_type(Act)) > 10, 60)
        server.released.clear()  # it must end while it waits for an action, too
        if end == "stopped":
            server.push_phase("stopped", 1)
        else:
            process.send_signal(getattr(signal, end))
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        server.released.set()
    assert process.returncode == 0, err
    document = json.loads(out)
    assert document["steps"] > 5
    assert document["ended"] == ("server stopped" if end == "stopped" else "asked to stop")
    assert "Traceback" not in err


def test_the_masks_of_an_environment_are_sent(start_server):
    class Masked(CountingEnv):
        def _mask(self):
            return {"action_mask": np.array([self.t % 2, 1], np.int8)}

        def reset(self, seed=None):
            return super().reset(seed)[0], self._mask()

        def step(self, action):
            return *super().step(action)[:4], self._mask()

    server = start_server()
    play(Masked, server.url, episodes=1)
    assert [np.asarray(act.mask).tolist() for act in server.of_type(Act)] == [[0, 1], [1, 1], [0, 1]]
