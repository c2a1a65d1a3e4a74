"""Ways to learn wrongly without noticing that no other test of the learner looks for; see docs/correctness.md."""

from __future__ import annotations

import sys

import pytest
import torch

from tetherl.algorithms import ppo_update
from tetherl.models.config import ModelConfig
from tetherl.models.policy import Policy
from tetherl.ops.normalize import normalize_advantages

MODULE = "encoder_that_is_noisy_in_training"
SOURCE = """
from torch import nn

class Noisy(nn.Module):
    def __init__(self, observation_space, action_space, config):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))

    def forward(self, obs):
        return self.layers(obs[""].float())
"""


@pytest.fixture
def noisy(kit, tmp_path, monkeypatch):
    """A policy whose encoder has dropout and batch statistics, with a head that shows them."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    policy = Policy(kit.box(), kit.policy().actions.space, ModelConfig(custom=f"{MODULE}:Noisy"), seed=0)
    with torch.no_grad():
        policy.policy_head.weight.mul_(100)
    yield policy
    sys.modules.pop(MODULE, None)


def test_dropout_and_batch_statistics_do_not_make_old_actions_less_probable(kit, noisy):
    learner = kit.learner(noisy)
    for version in range(2):
        fragments = kit.fragments(noisy, seed=version, version=version)
        metrics = learner.update(fragments, version=version, steps_trained=0).metrics
        assert metrics["learner/ratio_max_first"] <= 1e-4
    noisy.train()  # the wrong way
    metrics = learner.update(kit.fragments(noisy, version=2), version=2, steps_trained=0).metrics
    assert metrics["learner/ratio_max_first"] > 0.1


@pytest.mark.parametrize(("term", "on"), [("sampled_entropy", {"entropy_coeff": 0.01}), ("kl", {"use_kl_loss": True})])
def test_a_term_that_is_off_cannot_spoil_the_loss(kit, monkeypatch, term, on):
    """0·inf is NaN: a term without weight must not be multiplied by it."""

    def steps(**settings):
        policy = kit.policy()
        fragments = kit.fragments(policy)
        with monkeypatch.context() as patch:
            patch.setattr(type(policy.dist), term, lambda self, inputs, *rest: inputs.sum(1) + torch.inf)
            metrics = kit.learner(policy, epochs=1, **settings).update(fragments, version=0, steps_trained=0).metrics
        return metrics["learner/steps"], metrics["learner/skipped_steps"]

    made, skipped = steps()
    assert made > 0 and skipped == 0
    assert steps(**on) == (0, made)


def test_large_rewards_do_not_drown_the_policy_in_a_shared_trunk(kit):
    def gradient_norm(factor, **settings):
        policy = kit.policy(use_lstm=True, lstm_cell_size=16, vf_share_layers=True)
        fragments = kit.fragments(policy)
        for f in fragments:
            f.rewards *= factor
        learner = kit.learner(policy, lr=0.0, epochs=1, minibatch_size=10_000, **settings)
        return learner.update(fragments, version=0, steps_trained=0).metrics["learner/grad_norm"]

    assert gradient_norm(1000.0, normalize_values=True) == pytest.approx(gradient_norm(1.0, normalize_values=True), 0.1)
    assert gradient_norm(1000.0) > 100 * gradient_norm(1.0)


def test_advantages_are_centred_before_rows_are_weighted(kit, monkeypatch):
    """The other way round, rows with a small weight would push the policy by the mean alone."""
    policy = kit.policy(seed=1)
    fragments = kit.fragments(policy)
    learner = kit.learner(policy, lr=3e-2, loss="decoupled", max_lag=4)
    for _ in range(3):
        learner.update(kit.fragments(policy, seed=5), version=0, steps_trained=0)
    seen = []
    step = ppo_update.Update._step
    monkeypatch.setattr(ppo_update.Update, "_step", lambda self, m, **k: seen.append(self) or step(self, m, **k))
    learner.update(fragments, version=4, steps_trained=0)
    update = seen[0]
    advantages, weights = (update.table[update.column[name]] for name in ("advantage", "weight"))
    assert torch.equal(advantages, normalize_advantages(update.prepared.advantages))
    assert abs(float(advantages.mean())) < 1e-5 and abs(float((weights * advantages).mean())) > 1e-3
    assert weights.std() > 0.05
