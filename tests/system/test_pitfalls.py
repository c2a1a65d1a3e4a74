"""Ways in which the parts of a run could disagree unnoticed; see docs/correctness.md."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from tetherl.algorithm import Algorithm
from tetherl.algorithms.scaling import RewardScaling
from tetherl.config import RunConfig
from tetherl.data.fragment import EpisodeStats, Sample, StepCounts
from tetherl.tracking import Tracker


def settings(tmp_path, **more) -> dict:
    return {
        "name": "run",
        "runs_dir": str(tmp_path / "runs"),
        "engine": "inline",
        "env": "CartPole-v1",
        "model": {"fcnet_hiddens": [16], "normalize_observations": True},
        "algorithm": {"train_batch_size": 128, "minibatch_size": 64, "epochs": 2, "lr": 0.02},
        "rollouts": {"workers": 0, "envs_per_worker": 2, "fragment_length": 4},
        "stop": {"iterations": 3},
        **more,
    }


def names_of(kind, prefix: str = "") -> list[str]:
    """All settings, as section.name."""
    found = []
    for field in msgspec.structs.fields(kind):
        inner = [t for t in (field.type, *getattr(field.type, "__args__", ())) if hasattr(t, "__struct_fields__")]
        found += names_of(inner[0], f"{prefix}{field.name}.") if inner else [prefix + field.name]
    return found


def test_there_is_one_discount_and_reward_scaling_uses_it(tmp_path, monkeypatch):
    names = names_of(RunConfig)
    assert "algorithm.lr" in names
    assert [name for name in names if "gamma" in name or "discount" in name] == ["algorithm.gamma"]

    seen = []
    take = RewardScaling.take

    def watched(self, batch, fragments):
        seen.append(self._scaler.gamma)
        for f in fragments:  # rewards of CartPole are 1
            assert f.return_before == pytest.approx(2 * (1 - 0.5**f.t0))
        assert any(f.t0 for f in fragments)
        return take(self, batch, fragments)

    monkeypatch.setattr(RewardScaling, "take", watched)
    config = settings(tmp_path)
    config["algorithm"] |= {"gamma": 0.5, "reward_scaling": True}
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        algorithm.run()
    assert seen == [0.5] * 3


def test_a_restored_policy_scores_exactly_what_it_scored_before(tmp_path):
    config = RunConfig.from_dict(settings(tmp_path))
    with Algorithm(config) as algorithm:
        algorithm.run()
        before, sampled = algorithm.evaluate(6), algorithm.evaluate(6, explore=True)
        assert algorithm.policy.weights()["normalizer.count"] > 0
    config = RunConfig.from_dict(settings(tmp_path, stop={"iterations": 4}))
    with Algorithm(config) as algorithm:
        assert algorithm.iteration == 3
        after = algorithm.evaluate(6)
        assert (after.returns, after.lengths) == (before.returns, before.lengths)
        assert algorithm.evaluate(6, explore=True).returns == sampled.returns != before.returns
        # Without its statistics it plays another game.
        normalizer = algorithm.policy.normalizer
        normalizer.mean_0.fill_(1.0)
        normalizer.variance_0.fill_(1.0)
        algorithm.publish_weights()
        assert algorithm.evaluate(6).returns != before.returns


def sample(returns: list[float]) -> Sample:
    return Sample(1, [], [EpisodeStats(r, int(r), 1) for r in returns], StepCounts())


def test_the_curve_is_the_mean_of_the_last_100_episodes_whenever_they_ended():
    tracker = Tracker()
    assert tracker.metrics()["episode_return_mean"] is None and math.isnan(tracker.return_mean)
    returns = [float(r) for r in np.random.default_rng(0).integers(1, 50, 130)]
    for start in range(0, 130, 13):
        tracker.add(sample(returns[start : start + 13]))
        tracker.add(sample([]))  # an iteration in which no episode ended
        metrics = tracker.metrics()
        last = returns[: start + 13][-100:]
        assert metrics["episode_return_mean"] == pytest.approx(sum(last) / len(last))
        assert metrics["episode_length_mean"] == metrics["episode_return_mean"]
        assert metrics["episodes"] == start + 13 and tracker.full == (len(last) == 100)
