"""What goes wrong is said, keeps what was learned, and never hangs."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from tetherl.algorithm import Algorithm, Callbacks
from tetherl.config import RunConfig
from tetherl.errors import ActorDiedError, ConfigError, EngineError
from tetherl.workers import group


def settings(tmp_path, **more) -> dict:
    return {
        "name": "run",
        "runs_dir": str(tmp_path / "runs"),
        "env": "CartPole-v1",
        "algorithm": {"train_batch_size": 128, "minibatch_size": 64, "epochs": 1},
        **more,
    }


def events(algorithm: Algorithm) -> list[str]:
    return [event["kind"] for event in algorithm.run_dir.events.read()]


def test_a_dead_worker_keeps_what_was_learned_and_is_in_the_events(tmp_path):
    class Killer(Callbacks):
        def on_iteration(self, algorithm, metrics):
            if algorithm.iteration == 3:
                next(a for role, _, a in algorithm.team._actors if role == "rollout").close()

    config = settings(tmp_path, rollouts={"workers": 1}, stop={"iterations": 100})
    with pytest.raises(ActorDiedError, match="rollout worker 1"), Algorithm(RunConfig.from_dict(config), Killer()) as a:
        a.run()
    assert "worker_died" in events(a) and events(a)[-1] == "run_ended"
    assert a.run_dir.checkpoints.latest().iteration == 3


STUCK = """
import time, gymnasium, numpy as np
class Stuck(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.steps += 1
        if self.steps == 100:
            time.sleep(3600)
        return np.zeros(1, np.float32), 0.0, self.steps % 10 == 0, False, {}
"""


def test_an_environment_that_hangs_is_named(tmp_path, monkeypatch):
    (tmp_path / "stuck_env.py").write_text(STUCK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(group, "CALL_TIMEOUT_S", 2.0)
    config = settings(tmp_path, env="stuck_env:Stuck", rollouts={"workers": 1}, stop={"iterations": 100})
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        timer = threading.Timer(3.0, algorithm.request_stop, ["asked to"])
        timer.start()
        with pytest.raises(EngineError, match="rollout worker 1 did not stop sampling"):
            algorithm.run()


def test_close_goes_through_whatever_happens_on_the_way(tmp_path, kit):
    algorithm = Algorithm(RunConfig.from_dict(kit.external(tmp_path, stop={"iterations": 1}))).build()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    algorithm.announce = interrupted
    with pytest.raises(KeyboardInterrupt):
        algorithm.close()
    # The processes are gone (checked after each test) and the run directory is free again:
    again = Algorithm(RunConfig.from_dict(kit.external(tmp_path, stop={"iterations": 1})))
    again.build().close()


def test_metrics_of_users_may_be_numpy_numbers(tmp_path):
    class Mine(Callbacks):
        def on_iteration(self, algorithm, metrics):
            metrics["my/number"] = np.float32(1.5)
            metrics["my/nothing"] = np.float64("nan")

    config = settings(tmp_path, stop={"iterations": 1}, engine="inline")
    with Algorithm(RunConfig.from_dict(config), Mine()) as algorithm:
        algorithm.run()
    assert algorithm.run_dir.metrics.read()[0]["my/number"] == 1.5
    assert algorithm.run_dir.checkpoints.load("latest").state["metrics"]["my/nothing"] is None


def test_the_last_evaluation_is_part_of_the_last_iteration(tmp_path):
    config = settings(tmp_path, stop={"iterations": 2}, evaluation={"workers": 1, "interval": 2, "episodes": 3})
    config["checkpoint"] = {"score": "evaluation/episode_return_mean"}
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        result = algorithm.run()
    lines = algorithm.run_dir.metrics.read()
    assert [line["iteration"] for line in lines] == [1, 2]
    assert "evaluation/episode_return_mean" not in lines[0]
    assert lines[1]["evaluation/episodes"] == result.metrics["evaluation/episodes"] == 3
    assert algorithm.run_dir.checkpoints.best().iteration == 2


def test_evaluation_without_evaluation_workers(tmp_path, kit):
    config = settings(tmp_path, stop={"iterations": 1}, engine="inline")
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        algorithm.run()
        assert len(algorithm.evaluate(3).returns) == 3
    with Algorithm(RunConfig.from_dict(kit.external(tmp_path / "x", stop={"iterations": 1}))) as algorithm:
        with pytest.raises(ConfigError, match=r"evaluation\.env"):
            algorithm.evaluate(1)


def test_a_resumed_run_meets_other_episodes(tmp_path):
    first_observations = []

    class Recorder(Callbacks):
        def on_iteration(self, algorithm, metrics):
            first_observations.append(self.obs)

    for iterations in (1, 2):
        config = settings(tmp_path, stop={"iterations": iterations}, engine="inline")
        recorder = Recorder()
        with Algorithm(RunConfig.from_dict(config), recorder) as algorithm:
            take = algorithm.take_all

            def spy(take=take, recorder=recorder):
                batch = take()
                recorder.obs = batch[0].obs[""][0].tolist()
                return batch

            algorithm.take_all = spy
            algorithm.run()
    assert first_observations[0] != first_observations[1]


def test_step_says_when_the_run_is_to_stop(tmp_path):
    config = settings(tmp_path, stop={"iterations": 5}, engine="inline")
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        assert algorithm.step()["iteration"] == 1
        algorithm.request_stop("enough")
        assert algorithm.step() is None or algorithm.iteration == 2


def test_a_small_queue_drops_the_oldest_and_stays_under_its_bound(tmp_path, clients, kit):
    config = kit.external(
        tmp_path,
        rollouts={"workers": 1, "fragment_length": 32, "queue_bytes": 40_000},
        stop={"iterations": 4},
    )
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        update = algorithm.learner.update

        def slow(*args, **kwargs):
            time.sleep(3.0)
            return update(*args, **kwargs)

        algorithm.learner.update = slow
        clients.start(algorithm.url, 3)
        algorithm.run()
        algorithm.announce("stopped")
        assert [d["exit_code"] for d in clients.results()] == [0] * 3
        books = algorithm.queue.snapshot()
    assert books["dropped"]["overflow"] > 0 and books["balanced"]
    assert 0 < algorithm.queue.peak_bytes <= 40_000


def test_command_line_failures_are_plain_words(tmp_path, kit):
    (tmp_path / "ext.yaml").write_text(json.dumps({**kit.external(tmp_path), "name": "open"}))
    bind = kit.tetherl("train", str(tmp_path / "ext.yaml"), "external.address=0.0.0.0")
    assert bind.returncode == 2 and "TETHERL_TOKEN" in bind.stderr and "Traceback" not in bind.stderr
    assert not (tmp_path / "runs").exists()

    same = kit.tetherl("plan", str(tmp_path / "ext.yaml"), "external.port=9901", "external.worker_port=9901")
    assert same.returncode == 2 and "external.port" in same.stderr

    args = ["train", "--env", "CartPole-v1", f"runs_dir={tmp_path}/r", "name=a", "algorithm.train_batch_size=128"]
    args += ["algorithm.minibatch_size=128"]
    must = kit.tetherl(*args, "resume=must")
    assert must.returncode == 1 and not (tmp_path / "r").exists()
    assert kit.tetherl(*args, "stop.iterations=1").returncode == 0
    changed = kit.tetherl(*args, "stop.iterations=2", "algorithm.gamma=0.9")
    assert changed.returncode == 0 and "algorithm.gamma: 0.99 → 0.9" in changed.stderr
    before = (tmp_path / "r" / "a" / "events.jsonl").read_text()
    finished = kit.tetherl(*args, "stop.iterations=2", "algorithm.gamma=0.9")
    assert finished.returncode == 0 and "finished already" in finished.stderr
    assert (tmp_path / "r" / "a" / "events.jsonl").read_text() == before, "a finished run is left as it is"
    other = kit.tetherl(*args, "stop.iterations=3", "model.fcnet_hiddens=[32]")
    assert other.returncode == 1 and "model.fcnet_hiddens: [64, 64] → [32]" in other.stderr

    none = kit.tetherl("evaluate", "a", "--runs-dir", f"{tmp_path}/r", "--episodes", "0")
    assert none.returncode == 2 and "Traceback" not in none.stderr
    wrong = kit.tetherl("evaluate", "a", "--runs-dir", f"{tmp_path}/r", "--env", "MountainCar-v0")
    assert wrong.returncode == 1 and "MountainCar-v0" in wrong.stderr
