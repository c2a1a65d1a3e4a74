"""Runs with environments that tetherl steps itself, through the command line and through Python."""

from __future__ import annotations

import json

import pytest

from tetherl.algorithm import Algorithm, Callbacks
from tetherl.config import RunConfig


def settings(tmp_path, **more) -> dict:
    return {
        "name": "run",
        "runs_dir": str(tmp_path / "runs"),
        "env": "CartPole-v1",
        "algorithm": {"train_batch_size": 256, "minibatch_size": 128, "epochs": 2},
        "stop": {"iterations": 4},
        **more,
    }


def numbers(algorithm: Algorithm) -> list[dict]:
    """Metrics without those that depend on time or machine."""
    changing = ("time/", "resources/", "env_steps_per_s")
    return [{k: v for k, v in line.items() if not k.startswith(changing)} for line in algorithm.run_dir.metrics.read()]


@pytest.mark.parametrize("workers", [0, 2])
def test_inline_runs_repeat_to_the_bit(tmp_path, workers):
    def run(seed: int, where: str) -> list[dict]:
        config = settings(
            tmp_path / where, engine="inline", seed=seed, rollouts={"workers": workers, "envs_per_worker": 3}
        )
        with Algorithm(RunConfig.from_dict(config)) as algorithm:
            algorithm.run()
        return numbers(algorithm)

    first = run(1, "a")
    assert len(first) == 4 and first == run(1, "b")
    assert first != run(2, "c")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_stand_still_while_the_learner_learns(tmp_path, workers):
    config = settings(tmp_path, rollouts={"workers": workers, "envs_per_worker": 4})
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        algorithm.run()
        books = algorithm.queue.snapshot()
    metrics = algorithm.run_dir.metrics.read()
    assert [line["lag/max"] for line in metrics] == [0.0] * 4
    assert all(line["learner/ratio_max_first"] <= 1e-4 for line in metrics)
    assert books["balanced"] and books["received"] == books["trained"] >= 4 * 256
    assert books["received_learning"] == 0
    assert sum(v for k, v in metrics[-1].items() if k.startswith("batch/share/")) == pytest.approx(1.0)
    assert metrics[-1]["resources/algorithm/0/rss_bytes"] > 0


def test_complete_episodes(tmp_path):
    config = settings(tmp_path, rollouts={"envs_per_worker": 4, "batch_mode": "complete_episodes"})
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        algorithm.run()
        books = algorithm.queue.snapshot()
    assert books["balanced"] and books["trained"] >= 4 * 256
    assert books["pending"] == books["received"] - books["trained"] - sum(books["dropped"].values())


def test_continuous_actions_and_lstm_run(tmp_path):
    config = settings(
        tmp_path,
        env="Pendulum-v1",
        model={"use_lstm": True, "lstm_cell_size": 16, "max_seq_len": 8},
        rollouts={"envs_per_worker": 2},
    )
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        algorithm.run()
    metrics = algorithm.run_dir.metrics.read()
    assert all(line["learner/ratio_max_first"] <= 1e-4 for line in metrics)


def test_callbacks_and_evaluation_workers(tmp_path):
    class Mine(Callbacks):
        episodes = 0

        def on_iteration(self, algorithm, metrics):
            metrics["my/number"] = 42

        def on_episode_end(self, algorithm, episode_return, length):
            self.episodes += 1

    mine = Mine()
    config = settings(tmp_path, evaluation={"workers": 2, "interval": 1, "episodes": 5})
    with Algorithm(RunConfig.from_dict(config), mine) as algorithm:
        algorithm.run()
        before = algorithm.policy.weights()
        result = algorithm.evaluate(7)
        again = algorithm.evaluate(7)
        assert all((before[k] == v).all() for k, v in algorithm.policy.weights().items())
    assert len(result.returns) == 7 and result.returns == again.returns, "same seeds, greedy: same episodes"
    metrics = algorithm.run_dir.metrics.read()
    assert all(line["my/number"] == 42 for line in metrics)
    assert mine.episodes == algorithm.tracker.episodes > 0


def test_evaluation_changes_nothing_in_training(tmp_path):
    def run(where: str, **more) -> list[dict]:
        config = settings(tmp_path / where, engine="inline", **more)
        with Algorithm(RunConfig.from_dict(config)) as algorithm:
            algorithm.run()
        return [{k: v for k, v in line.items() if not k.startswith("evaluation/")} for line in numbers(algorithm)]

    assert run("a") == run("b", evaluation={"interval": 1, "episodes": 3})


def test_command_line_trains_resumes_and_says_when_finished(tmp_path, kit):
    args = ["train", "--env", "CartPole-v1", f"runs_dir={tmp_path}", "name=mine", "algorithm.train_batch_size=256"]
    first = kit.tetherl(*args, "stop.iterations=3", "--json")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["iteration"] == 3 and document["resumed_from"] is None
    assert document["steps"]["received"] == document["steps"]["trained"] == 3 * 256

    longer = kit.tetherl(*args, "stop.iterations=5", "--json")
    assert longer.returncode == 0, longer.stderr
    document = json.loads(longer.stdout)
    assert document["iteration"] == 5 and document["resumed_from"].endswith("000003")
    assert "resumed from" in longer.stderr

    again = kit.tetherl(*args, "stop.iterations=5", "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["already_finished"]
    assert "finished already" in again.stderr

    lines = [json.loads(line) for line in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["env_steps"] for line in lines] == [256 * i for i in range(1, 6)]

    evaluated = kit.tetherl("evaluate", "mine", "--runs-dir", str(tmp_path), "--episodes", "3", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    document = json.loads(evaluated.stdout)
    assert document["checkpoint"] == 5 and document["episodes"] == 3
    table = kit.tetherl("evaluate", str(tmp_path / "mine"), "--checkpoint", "best", "--episodes", "2")
    assert table.returncode == 0 and "mean" in table.stdout


def test_resume_settings(tmp_path, kit):
    args = ["train", "--env", "CartPole-v1", f"runs_dir={tmp_path}", "name=x", "algorithm.train_batch_size=128"]
    args += ["algorithm.minibatch_size=128", "stop.iterations=1"]
    must = kit.tetherl(*args, "resume=must")
    assert must.returncode == 1 and "resume is 'must'" in must.stderr
    assert kit.tetherl(*args, "resume=auto").returncode == 0
    never = kit.tetherl(*args, "resume=never")
    assert never.returncode == 1 and "exists already" in never.stderr


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["algorithm.lrr=1"], 2, "algorithm.lr"),
        (["algorithm.gamma=1.5"], 2, "algorithm.gamma"),
        (["rollouts.workers=many"], 2, "rollouts.workers"),
        (["machine.gpus=0", "rollouts.workers=1", "rollouts.gpus_per_worker=1"], 3, "rollouts.gpus_per_worker"),
    ],
)
def test_bad_configuration_is_refused_before_anything_starts(tmp_path, kit, words, code, text):
    done = kit.tetherl("train", "--env", "CartPole-v1", f"runs_dir={tmp_path}/runs", *words)
    assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_environment_that_raises_names_worker_and_cause(tmp_path, kit):
    (tmp_path / "broken.py").write_text(
        "import gymnasium\n"
        "class Broken(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (2,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return self.observation_space.sample() * 0, {}\n"
        "    def step(self, action):\n"
        "        raise RuntimeError('the game crashed')\n"
    )
    done = kit.tetherl("train", "--env", "broken:Broken", "rollouts.workers=1", "runs_dir=runs", cwd=tmp_path)
    assert done.returncode == 1
    assert "the game crashed" in done.stderr and "rollout worker 1" in done.stderr
