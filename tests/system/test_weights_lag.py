"""The testing hook that makes experience late on purpose."""

from __future__ import annotations

import numpy as np
import pytest

from tetherl.algorithm import Algorithm, Callbacks
from tetherl.config import RunConfig
from tetherl.errors import ConfigError
from tetherl.testing.probes import Alternate
from tetherl.workers.rollout import RolloutWorker


def config(tmp_path, **algorithm):
    return RunConfig.from_dict(
        {
            "env": Alternate,
            "algorithm": {"train_batch_size": 64, "minibatch_size": 32, "epochs": 2, **algorithm},
            "stop": {"iterations": 7},
            "runs_dir": str(tmp_path),
            "name": "late",
            "checkpoint": {"interval": None, "at_end": False},
            "engine": "inline",
        }
    )


class Lags(Callbacks):
    def __init__(self):
        self.seen = []

    def on_iteration(self, algorithm, metrics):
        self.seen.append((metrics["lag/min"], metrics["lag/max"]))


@pytest.mark.parametrize("lag", [0, 3])
def test_the_policy_that_acts_is_so_many_versions_old(tmp_path, monkeypatch, lag):
    given, kept = [], {}
    take = RolloutWorker.set_weights

    def set_weights(self, weights, version):
        given.append((version, weights["policy_head.weight"].copy()))
        take(self, weights, version)

    monkeypatch.setattr(RolloutWorker, "set_weights", set_weights)
    lags = Lags()
    with Algorithm(config(tmp_path, max_lag=lag), lags, weights_lag=lag) as algorithm:
        learn = algorithm.learn

        def remember(batch):
            kept[algorithm.version] = algorithm.policy.weights()["policy_head.weight"]
            learn(batch)

        monkeypatch.setattr(algorithm, "learn", remember)
        metrics = algorithm.run().metrics
    expected = [max(0, version - lag) for version in range(8)]
    assert [version for version, _ in given] == expected
    assert lags.seen == [(min(i, lag), min(i, lag)) for i in range(7)]
    for version, weights in given[:-1]:
        np.testing.assert_array_equal(weights, kept[version])
    assert metrics["steps/trained"] == metrics["steps/received"] == 7 * 64


def test_a_lag_at_which_nothing_could_be_trained_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"weights_lag 3: algorithm\.max_lag is 2"):
        Algorithm(config(tmp_path, max_lag=2), weights_lag=3)
