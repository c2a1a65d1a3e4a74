"""Runs whose learning happens in learner workers: processes of their own that make each update together."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import psutil
import pytest

from tetherl.algorithm import Algorithm, Callbacks
from tetherl.config import RunConfig
from tetherl.errors import ActorDiedError, ActorMethodError


def settings(tmp_path, workers, **more) -> dict:
    return {
        "name": "run",
        "runs_dir": str(tmp_path / "runs"),
        "env": "CartPole-v1",
        "algorithm": {"train_batch_size": 256, "minibatch_size": 64, "epochs": 2, "use_kl_loss": True},
        "rollouts": {"envs_per_worker": 4, "fragment_length": 32},
        "learners": {"workers": workers},
        "machine": {"cpus": 16},
        "stop": {"iterations": 3},
        **more,
    }


def run(config: dict, callbacks: Callbacks | None = None):
    """-> (metrics per iteration, books, weights, where it was resumed from)."""
    with Algorithm(RunConfig.from_dict(config), callbacks) as algorithm:
        algorithm.run()
        return (
            algorithm.run_dir.metrics.read(),
            algorithm.queue.snapshot(),
            algorithm.policy.weights(),
            algorithm.resumed,
        )


def test_two_learner_workers_train_resume_and_leave_checkpoints_that_any_number_can_load(tmp_path):
    metrics, books, weights, _ = run(settings(tmp_path, 2))
    assert len(metrics) == 3
    assert books["balanced"] and books["received"] == books["trained"] >= 3 * 256
    assert all(line["learner/steps"] >= 8 and line["learner/ratio_max_first"] <= 1e-4 for line in metrics)
    assert all(line[f"resources/learner/{i}/rss_bytes"] > 0 for line in metrics for i in (1, 2))

    # They have done what one would have done: the same environments, the same numbers.
    alone, _, own, _ = run(settings(tmp_path / "alone", 0))
    for key in ("learner/policy_loss", "learner/vf_loss", "learner/kl", "learner/grad_norm"):
        assert metrics[0][key] == pytest.approx(alone[0][key], rel=1e-3, abs=1e-5), key
    assert metrics[0]["learner/kl_coeff"] == alone[0]["learner/kl_coeff"]
    assert max(np.abs(weights[k] - own[k]).max() for k in own if k.startswith("policy_head")) < 0.5

    for iterations, workers in ((4, 2), (5, 1), (6, 0), (7, 2)):
        config = settings(tmp_path, workers, stop={"iterations": iterations})
        metrics, books, _, resumed = run(config)
        assert str(resumed.path).endswith(f"{iterations - 1:06d}")
        assert [line["iteration"] for line in metrics] == list(range(1, iterations + 1))
        assert books["balanced"] and books["trained"] >= iterations * 256


def test_with_the_inline_engine_they_are_threads_and_repeat_to_the_bit(tmp_path):
    one = run(settings(tmp_path / "a", 2, engine="inline"))
    two = run(settings(tmp_path / "b", 2, engine="inline"))
    assert all(np.array_equal(one[2][k], two[2][k]) for k in one[2])
    assert one[0][-1]["learner/policy_loss"] == two[0][-1]["learner/policy_loss"]


def test_a_learner_worker_that_dies_is_named(tmp_path):
    class Kill(Callbacks):
        def on_iteration(self, algorithm, metrics):
            pid = next(pid for role, index, pid in algorithm.team.pids() if (role, index) == ("learner", 2))
            psutil.Process(pid).send_signal(signal.SIGKILL)

    with pytest.raises(ActorDiedError, match="learner worker 2"):
        run(settings(tmp_path, 2, stop={"iterations": 5}), Kill())


def test_a_learner_worker_that_stands_still_is_found_dead_when_it_is_ended(tmp_path):
    """Killed in the middle of an update that waits for it."""

    class Stop(Callbacks):
        def on_iteration(self, algorithm, metrics):
            pid = next(pid for role, index, pid in algorithm.team.pids() if (role, index) == ("learner", 1))
            os.kill(pid, signal.SIGSTOP)
            self.timer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
            self.timer.start()

    stop = Stop()
    with pytest.raises(ActorDiedError, match="learner worker 1"):
        run(settings(tmp_path, 2, stop={"iterations": 5}), stop)
    stop.timer.join(60)


def test_learning_that_fails_says_where_and_why(tmp_path):
    class Poison(Callbacks):
        def on_iteration(self, algorithm, metrics):
            learn = algorithm.learner.update
            algorithm.learner.update = lambda batch, **more: learn([*batch, "not a fragment"], **more)

    with pytest.raises(ActorMethodError, match=r"learner worker [12].*update"):
        run(settings(tmp_path, 2, stop={"iterations": 5}), Poison())
