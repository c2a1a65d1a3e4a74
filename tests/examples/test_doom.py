"""The ViZDoom example: the game itself, the founding configuration end to end, and the one-command run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from tetherl import Algorithm, Callbacks, RunConfig
from tetherl.errors import ConfigError

pytest.importorskip("vizdoom", reason="the Doom example needs the extra 'examples'")

DEADLINE_S = 240.0
DOOM = Path(__file__).resolve().parents[2] / "examples" / "doom"
FOUNDING_PARAMETERS = 2_216_723


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    deadline = time.monotonic() + 30
    while left := [
        p for p in psutil.Process().children(recursive=True) if p not in before and p.status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, f"processes were left behind: {left}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def client() -> ModuleType:
    """examples/doom/client.py as a module."""
    spec = importlib.util.spec_from_file_location("doom_client", DOOM / "client.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doom_client"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def doom(client: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes games, and closes them."""
    monkeypatch.chdir(tmp_path)
    games: list[Any] = []

    def make(**settings: Any) -> Any:
        games.append(client.Doom(**{**client.DEFAULTS, "seed": 1, **settings}))
        return games[-1]

    yield make
    for game in games:
        game.close()


def play(game: Any, keys: Callable[[], list[int]]) -> tuple[list[float], np.ndarray | None, bool, bool]:
    """One episode -> rewards, last frame, terminated, truncated."""
    game.reset()
    rewards = []
    while True:
        frame, reward, terminated, truncated = game.press(np.array(keys()))
        rewards.append(reward)
        if terminated or truncated:
            return rewards, frame, terminated, truncated


# ---- the game


@pytest.mark.parametrize(("frame_skip", "decisions"), [(4, 75), (7, 43)])
def test_the_time_limit_truncates_after_300_tics_with_a_real_last_frame(
    doom: Callable[..., Any], frame_skip: int, decisions: int
) -> None:
    rewards, frame, terminated, truncated = play(doom(frame_skip=frame_skip), lambda: [0, 0, 0])
    assert (terminated, truncated) == (False, True)
    assert len(rewards) == decisions and sum(rewards) == -300.0  # -1 a tic, also when the last skip is cut short
    assert frame is not None and frame.shape == (240, 320, 1) and frame.dtype == np.uint8
    assert frame.std() > 0


def test_killing_the_monster_terminates(doom: Callable[..., Any]) -> None:
    game, rng = doom(), np.random.default_rng(0)
    for _ in range(30):
        rewards, _, terminated, truncated = play(game, lambda: rng.integers(0, 2, 3).tolist())
        killed = max(rewards) > 90
        assert (terminated, truncated) == (killed, not killed)
        if killed:
            return
    pytest.fail("30 episodes of random play have not hit the monster once")


def test_small_frames_are_means_of_the_screen(doom: Callable[..., Any]) -> None:
    full, small = doom().reset(), doom(height=60, width=80).reset()
    assert small.shape == (60, 80, 1) and small.dtype == np.uint8
    assert small[3, 5, 0] == int(full[12:16, 20:24].mean())
    assert small[59, 79, 0] == int(full[236:, 316:].mean())


def test_frames_follow_the_keys_and_the_seed(doom: Callable[..., Any]) -> None:
    a, same, other = doom(seed=3), doom(seed=3), doom(seed=4)
    first = a.reset()
    assert np.array_equal(first, same.reset())
    assert not np.array_equal(first, other.reset())
    left, right = a.press(np.array([1, 0, 0]))[0], same.press(np.array([0, 1, 0]))[0]
    assert not np.array_equal(left, right)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"buttons": "ten"}, "expected one of basic, nine"),
        ({"frame_skip": 0}, "at least 1"),
        ({"height": 84, "width": 84}, "whole fraction"),
    ],
)
def test_wrong_settings_are_refused(doom: Callable[..., Any], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        doom(**wrong)


def connected(**changes: Any) -> SimpleNamespace:
    """What a PolicyClient knows of a run with small frames and three keys."""
    facts = {
        "env_config": {"height": 60, "width": 80, "frame_skip": 2},
        "observation_space": {"type": "Box", "low": 0, "high": 255, "shape": [60, 80, 1], "dtype": "uint8"},
        "action_space": {"type": "MultiDiscrete", "nvec": [2, 2, 2]},
    }
    return SimpleNamespace(**{**facts, **changes})


def test_settings_come_from_the_server_and_the_command_line_wins(client: ModuleType) -> None:
    settings = client.settings_for(connected(), {"frame_skip": 8})
    assert settings == {"buttons": "basic", "frame_skip": 8, "height": 60, "width": 80}


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"env_config": {"skip": 4}}, {}, "has skip, which this game does not know"),
        ({}, {"height": 120, "width": 160}, r"\[120, 160, 1\], the run expects \[60, 80, 1\]"),
        ({}, {"buttons": "nine"}, "9 keys, but the run's action space"),
    ],
)
def test_a_game_that_does_not_fit_the_run_says_so(
    client: ModuleType, changes: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        client.settings_for(connected(**changes), given)


# ---- with a server


class Record(Callbacks):
    """Keeps all metrics; ends a run that takes too long."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []
        self._deadline = time.monotonic() + DEADLINE_S

    def on_iteration(self, algorithm: Algorithm, metrics: dict[str, Any]) -> None:
        self.metrics.append(dict(metrics))

    def on_wait(self, algorithm: Algorithm) -> None:
        if time.monotonic() > self._deadline:
            algorithm.request_stop("the test's deadline")


def test_the_founding_configuration_trains_from_two_real_games(tmp_path: Path) -> None:
    settings = [f"runs_dir={tmp_path / 'runs'}", "external.port=0", "external.worker_port=0", "stop.iterations=3"]
    settings += ["algorithm.train_batch_size=64", "algorithm.minibatch_size=32", "algorithm.epochs=1"]
    record = Record()
    algorithm = Algorithm(RunConfig.load(DOOM / "doom.yaml", settings), record)
    games: list[subprocess.Popen[str]] = []
    try:
        algorithm.build()
        assert sum(p.numel() for p in algorithm.policy.parameters()) == FOUNDING_PARAMETERS
        for seed in range(2):
            command = [sys.executable, str(DOOM / "client.py"), "--connect", str(algorithm.url)]
            games.append(
                subprocess.Popen(
                    [*command, "--seed", str(seed), "--json"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=tmp_path,
                )
            )
        result = algorithm.run()
        games[0].terminate()  # in the middle of its game
        ends = [games[0].communicate(timeout=DEADLINE_S)]
        algorithm.close()  # tells the other one
        ends.append(games[1].communicate(timeout=DEADLINE_S))
    finally:
        algorithm.close()
        for game in games:
            game.kill()
            game.communicate()

    assert result.reason.startswith("stop.iterations"), result.reason
    assert [game.returncode for game in games] == [0, 0], ends
    played = [json.loads(out) for out, _ in ends]
    assert [p["ended"] for p in played] == ["asked to stop", "server stopped"]
    assert all(p["episodes"] >= 1 and p["episodes_lost"] == 0 for p in played)
    assert sorted(os.listdir(tmp_path)) == ["runs"]  # ViZDoom's own files are not left in the current directory

    assert len(record.metrics) == 3
    for metrics in record.metrics:
        for name in ("policy_loss", "vf_loss", "entropy", "kl", "grad_norm"):
            assert math.isfinite(metrics[f"learner/{name}"]), name
        assert metrics["learner/skipped_steps"] == 0
        dropped = sum(n for name, n in metrics.items() if name.startswith("steps/dropped/"))
        assert metrics["steps/received"] == metrics["steps/trained"] + dropped + metrics["steps/pending"]
    last = record.metrics[-1]
    assert last["steps/trained"] >= 3 * 64
    # Each of the two workers has its game. Nine independent keys: fresh entropy is 9 ln 2.
    assert last["clients_by_worker/1"] == last["clients_by_worker/2"] == 1
    assert record.metrics[0]["learner/entropy"] == pytest.approx(9 * math.log(2), rel=0.02)
    # Fresh rows: what the learner computes for them is what the rollout workers computed, LSTM included.
    fresh = [m["learner/ratio_max_first"] for m in record.metrics if "learner/ratio_max_first" in m]
    assert fresh and max(fresh) <= 1e-4
    assert sum(p["steps"] for p in played) >= last["steps/received"]


def run_py(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(DOOM / "run.py"), "--games", "2", "--runs-dir", str(tmp_path / "runs"), *more]
    command += ["algorithm.train_batch_size=128", "algorithm.minibatch_size=128", "algorithm.epochs=1"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)


def test_run_trains_evaluates_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = run_py(tmp_path, "--greedy", "2", "--json", "facts.json", "--plot", "curve.png", "stop.iterations=2")
    out, err = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0, err
    facts = json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))
    assert facts["ended"].startswith("stop.iterations")
    assert len(facts["curve"]) == 2 and facts["curve"][-1]["env_steps"] >= 256
    assert facts["greedy"]["episodes"] == 2 and "2 episodes without exploration" in out
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_ctrl_c_ends_server_and_games(tmp_path: Path) -> None:
    run = run_py(tmp_path)
    try:
        assert run.stdout is not None
        assert "2 games play at" in run.stdout.readline()
        time.sleep(1.0)  # somewhere between start and play; any moment must do
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=DEADLINE_S)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 0, err
    assert "training ended: stopped by SIGINT" in out
