"""Normalised observations and scaled rewards in whole runs: the first ratios stay 1, evaluation changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tetherl.algorithm import Algorithm
from tetherl.config import RunConfig

GRU = {"rnn": "gru", "lstm_cell_size": 16, "max_seq_len": 8, "lstm_use_prev_reward": True}


def settings(tmp_path, **more) -> dict:
    return {
        "name": "run",
        "runs_dir": str(tmp_path / "runs"),
        "engine": "inline",
        "env": "CartPole-v1",
        "algorithm": {"train_batch_size": 256, "minibatch_size": 128, "epochs": 2, "reward_scaling": True},
        "rollouts": {"workers": 2, "envs_per_worker": 3, "fragment_length": 16},
        "stop": {"iterations": 5},
        **more,
    }


def check_ratios(lines: list[dict]) -> None:
    assert lines and all(line["learner/ratio_max_first"] <= 1e-4 for line in lines)


@pytest.mark.parametrize("vectorization", ["own", "sync"])
@pytest.mark.parametrize("model", [{}, GRU], ids=["plain", "gru"])
def test_first_ratios_are_one_and_returns_are_raw(tmp_path, model, vectorization):
    config = settings(
        tmp_path, model={"normalize_observations": True, **model}, evaluation={"interval": 1, "episodes": 3}
    )
    config["rollouts"]["vectorization"] = vectorization
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        algorithm.run()
        before = algorithm.policy.weights()
        algorithm.evaluate(3)
        assert all(np.array_equal(v, before[k]) for k, v in algorithm.policy.weights().items())
        counted = int(before["normalizer.count"])
        assert counted == algorithm.queue.ledger.trained, "each step of each batch once, and no reset row"
    lines = algorithm.run_dir.metrics.read()
    check_ratios(lines)
    assert all(0 < line["learner/reward_scale"] < 1 for line in lines), "returns of CartPole deviate by more than 1"
    assert lines[-1]["episode_return_mean"] == lines[-1]["episode_length_mean"]


def test_a_resumed_run_goes_on_with_its_statistics(tmp_path):
    config = settings(tmp_path, model={"normalize_observations": True})
    config["stop"] = {"iterations": 2}
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        algorithm.run()
        before = algorithm.policy.weights()
    config["stop"] = {"iterations": 4}
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        assert all(np.array_equal(v, before[k]) for k, v in algorithm.policy.weights().items())
        algorithm.run()
        assert algorithm.policy.weights()["normalizer.count"] > before["normalizer.count"]
    check_ratios(algorithm.run_dir.metrics.read())


@pytest.mark.parametrize("fate", ["keep", "hold"])
def test_external_clients_with_normalised_observations(tmp_path, clients, kit, fate):
    config = kit.external(
        tmp_path,
        external={"during_learning": fate},
        model={"normalize_observations": True, **GRU},
        rollouts={"workers": 2, "fragment_length": 32},
        stop={"iterations": 3},
    )
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        clients.start(algorithm.url, 3)
        algorithm.run()
        algorithm.announce("stopped")
        assert [d["exit_code"] for d in clients.results()] == [0] * 3
        assert algorithm.policy.weights()["normalizer.count"] >= algorithm.queue.ledger.trained
    lines = [line for line in algorithm.run_dir.metrics.read() if "learner/ratio_max_first" in line]
    check_ratios(lines)
