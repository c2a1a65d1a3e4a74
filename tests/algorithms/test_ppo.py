from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.algorithms import ppo_update
from tetherl.algorithms.minibatches import Minibatch
from tetherl.algorithms.preparation import Inputs, PreparedBatch
from tetherl.data.batch import SampleBatch
from tetherl.errors import ConfigError
from tetherl.models.policy import PolicyOutput
from tetherl.ops.distributions import Categorical

KEYS = spaces.MultiDiscrete([2, 3, 2])
ARM = spaces.Box(-2.0, 2.0, (2,), np.float32)
LSTM = {"use_lstm": True, "lstm_cell_size": 16}


def changed(a: dict, b: dict) -> bool:
    return any(not np.array_equal(a[k], b[k]) for k in a)


# ---------------------------------------------------------------------------------- first check


@pytest.mark.parametrize(
    ("actions", "model"),
    [
        (spaces.Discrete(3), {}),
        (ARM, {}),
        (KEYS, LSTM),
        (KEYS, LSTM | {"lstm_use_prev_reward": True}),
        (ARM, LSTM | {"lstm_use_prev_action": True}),
        (spaces.MultiBinary(4), LSTM | {"vf_share_layers": False}),
    ],
)
def test_ratios_are_1_on_fresh_data(kit, actions, model):
    policy = kit.policy(actions=actions, **model)
    learner = kit.learner(policy, epochs=2)
    for version in range(3):  # several chunks per fragment, fragments cut inside episodes, episodes of 20 and 13
        fragments = kit.fragments(policy, seed=version, version=version, fragment_length=19)
        assert any(f.t0 for f in fragments)
        metrics = learner.update(fragments, version=version, steps_trained=0).metrics
        assert metrics["learner/ratio_max_first"] <= 1e-4
        assert metrics["learner/outside_clip_first"] == 0
        assert abs(metrics["learner/kl_behaviour"]) < 1e-6


@pytest.mark.parametrize("field", ["logp", "prev_action", "state_in"])
def test_the_first_check_sees_what_does_not_fit(kit, field):
    policy = kit.policy(actions=KEYS, **LSTM)
    kit.learner(policy, lr=1e-2).update(kit.fragments(policy), version=0, steps_trained=0)  # away from uniform
    fragments = kit.fragments(policy, fragment_length=9)
    for f in fragments:
        if field == "logp":
            f.logp[-1] += 0.01
        elif f.t0 and field == "prev_action":
            f.prev_action = 1 - np.minimum(f.prev_action, 1)
        elif f.t0:
            f.state_in = None
    metrics = kit.learner(policy).update(fragments, version=0, steps_trained=0).metrics
    assert metrics["learner/ratio_max_first"] > 1e-3


# ---------------------------------------------------------------------------------- the loss


class Table:
    """A "policy" whose outputs are a table, one line per row: obs is the row's number."""

    is_recurrent, state_size, dist = False, 0, Categorical(3)

    def __init__(self, logits, values):
        self.logits, self.values = logits, values

    def __call__(self, obs, prev_action, prev_reward, has_prev, lengths, state):
        rows = obs[""].long()
        return PolicyOutput(self.logits[rows], self.values[rows], None)

    def normalize(self, values):
        return values


def test_the_whole_loss_and_its_gradient_match_the_golden_case(kit, monkeypatch):
    case = kit.golden("ppo_05_total_loss_masked")
    inputs, expected = case["inputs"], case["expected"]
    order = [0, 3, 1, 2]  # the padding row comes between the others
    flat = {k: torch.tensor(v).flatten(0, 1)[order] for k, v in inputs.items() if isinstance(v, list)}
    valid = flat["mask"].numpy() > 0
    logits = flat["logits_new"].clone().requires_grad_()
    rows = np.arange(4)
    behaviour = Categorical(3).log_prob(flat["logits_old"], flat["actions"][:, None])
    batch = SampleBatch(
        obs={},
        final_obs={},
        actions=flat["actions"][:, None].numpy(),
        logp=behaviour.numpy(),
        dist=flat["logits_old"].numpy(),
        rewards=np.zeros(4, np.float32),
        lag=np.zeros(4, np.int64),
        valid=valid,
        prev_action=np.zeros((4, 1)),
        prev_reward=np.zeros(4),
        has_prev=np.zeros(4, bool),
        lengths=np.array([4]),
        terminated=np.zeros(1, bool),
        state_in=None,
    )
    zeros = torch.zeros(4)
    prepared = PreparedBatch(
        batch=batch,
        inputs=Inputs({"": torch.arange(4)}, zeros, zeros, zeros, torch.device("cpu")),
        actions=flat["actions"][:, None],
        logp=behaviour,
        dist=flat["logits_old"],
        prox_logp=behaviour,
        prox_dist=flat["logits_old"],
        mask=None,
        values=zeros,
        advantages=flat["advantages"],
        targets=flat["value_targets"],
        chunks=None,
        chunk_states=None,
        finite=np.ones(1, bool),
    )
    learner = kit.learner(
        kit.policy(),
        clip_param=inputs["clip"],
        vf_loss_coeff=inputs["vf_coef"],
        entropy_coeff=inputs["ent_coef"],
        kl_coeff=inputs["kl_coef"],
        use_kl_loss=True,
        advantage_norm="none",
    )
    learner.policy = Table(logits, flat["values_new"])
    losses = []

    def backward(loss, numbers):
        losses.append(loss)
        loss.backward()
        return numbers

    monkeypatch.setattr(learner, "backward", backward)
    monkeypatch.setattr(learner, "step", lambda loss, *, lr: torch.zeros(()))
    update = ppo_update.Update(learner, prepared, valid, 0)
    minibatch = Minibatch(rows=rows, picked=np.flatnonzero(valid), trained=rows[valid])
    update.means, update.norms, update.kls = ppo_update.Mean(), ppo_update.Mean(), ppo_update.Mean()
    numbers = update._step(minibatch, measure_kl=True)
    assert losses[0].item() == pytest.approx(expected["loss"], rel=1e-5)
    names = ("policy_loss", "value_loss", "entropy")
    assert numbers[1:4].tolist() == pytest.approx([expected[k] for k in names], rel=1e-5)
    assert numbers[5].item() == pytest.approx(expected["kl_old_new"], rel=1e-4)
    assert logits.grad.numpy() == pytest.approx(
        np.array(expected["grad_logits_new"]).reshape(4, 3)[order], rel=1e-4, abs=1e-7
    )


ALL_ON = {"use_kl_loss": True, "entropy_coeff": 0.01, "max_lag": 8}


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 0.9},
        {"lambda_": 0.5},
        {"minibatch_size": 32},
        {"epochs": 3},
        {"lr": 2e-3},
        {"clip_param": 0.01},
        {"lag_factor": 0.0},
        {"clip_max": 0.02},
        {"max_lag": 2},
        {"vf_loss_coeff": 1.0},
        {"entropy_coeff": 0.1},
        {"use_kl_loss": False},
        {"kl_coeff": 2.0},
        {"kl_target": 1e-6},
        {"grad_clip": 0.01},
        {"grad_clip": None},
        {"advantage_norm": "minibatch"},
        {"advantage_norm": "none"},
        {"normalize_values": True},
        {"adam_eps": 1e-3},
        {"loss": "plain"},
        {"loss": "decoupled"},
        {"loss": "decoupled", "clip_param": 0.2},
        {"vf_clip": "clamped_error", "vf_clip_param": 0.1},
        {"vf_clip": "clipped_value", "vf_clip_param": 0.01},
        {"target_kl": 1e-5},
        {"recompute_advantages": "per_epoch"},
        {"state_refresh": "per_epoch"},
        {"burn_in": 3},
        {"shuffle": False},
        {"reward_scale": 2.0},
        {"reward_clip": 0.5},
        {"max_seq_len": 5},
        {"seed": 1},
    ],
    ids=str,
)
def test_every_setting_changes_what_is_learned(kit, change):
    base = ALL_ON | {"clip_param": 0.02, "lr": 5e-3}

    def weights(settings):
        policy = kit.policy(**LSTM)
        learner = kit.learner(policy, **(base | settings))
        for version in (3, 4):  # β, adapted after the first update, acts in the second
            fragments = kit.fragments(policy, version=0, steps=128)
            learner.update(fragments, version=version, steps_trained=0)
        return policy.weights()

    reference = weights({})
    assert not changed(reference, weights({}))
    assert changed(reference, weights(change))


def test_rows_that_are_not_trained_on_have_no_loss_but_count_as_context(kit):
    def weights(spoil):
        policy = kit.policy(**LSTM)
        fragments = kit.fragments(policy, steps=64)
        for f in fragments:
            f.versions[3:6] = -9
            f.by_policy[7] = False
            spoil(f)
        result = kit.learner(policy).update(fragments, version=0, steps_trained=0)
        assert result.dropped["stale"] == 3 * len(fragments)
        assert result.dropped["not_policy"] == len(fragments)
        assert result.trained + sum(result.dropped.values()) == sum(map(len, fragments))
        return policy.weights()

    context = [3, 4, 5, 7]

    def spoil_loss(f):
        f.logp[context] += 7
        f.dist[context] -= 3

    def spoil_reward(f):
        f.rewards[context] += 1

    def spoil_obs(f):
        f.obs[""][context] += 1

    reference = weights(lambda f: None)
    assert not changed(reference, weights(spoil_loss))
    assert changed(reference, weights(spoil_reward))
    assert changed(reference, weights(spoil_obs))  # memory goes through these rows


def test_permuting_chunks_leaves_the_summed_gradient_unchanged(kit):
    def gradient(seed):
        policy = kit.policy(**LSTM)
        learner = kit.learner(policy, seed=seed, minibatch_size=10_000, epochs=1, lr=0.0, grad_clip=None)
        learner.update(kit.fragments(policy), version=0, steps_trained=0)
        return torch.cat([p.grad.flatten() for p in policy.parameters()])

    first, second = gradient(0), gradient(1)
    assert first.abs().max() > 1e-3
    assert torch.allclose(first, second, atol=1e-6)


def test_every_row_is_trained_on_once_per_epoch(kit, monkeypatch):
    policy = kit.policy(**LSTM)
    learner = kit.learner(policy, epochs=3)
    fragments = kit.fragments(policy)
    seen = []
    step = ppo_update.Update._step
    monkeypatch.setattr(ppo_update.Update, "_step", lambda self, m, **k: seen.append(m.trained) or step(self, m, **k))
    result = learner.update(fragments, version=0, steps_trained=0)
    assert result.trained == sum(map(len, fragments))
    assert np.bincount(np.concatenate(seen)).tolist() == [3] * result.trained
    assert result.metrics["learner/steps"] == len(seen)


# ---------------------------------------------------------------------------------- lag


def test_lag_is_measured_over_trained_rows(kit):
    policy = kit.policy()
    fragments = kit.fragments(policy, steps=64, version=5)
    for f in fragments:
        f.versions[:] = 5
        f.versions[:2] = 3
        f.versions[2] = 0  # too old
    result = kit.learner(policy, max_lag=4).update(fragments, version=6, steps_trained=0)
    rows, old = result.trained, 2 * len(fragments)
    assert result.metrics["lag/min"] == 1 and result.metrics["lag/max"] == 3
    assert result.metrics["lag/mean"] == pytest.approx((rows + 2 * old) / rows)
    assert "learner/ratio_max_first" not in result.metrics  # nothing is fresh
    assert result.metrics["learner/valid_fraction"] == pytest.approx(rows / sum(map(len, fragments)))


def test_at_lag_0_the_lag_settings_change_nothing(kit):
    def weights(**settings):
        policy = kit.policy()
        kit.learner(policy, clip_param=0.01, lr=1e-2, **settings).update(
            kit.fragments(policy), version=0, steps_trained=0
        )
        return policy.weights()

    assert not changed(weights(lag_factor=0.0), weights(lag_factor=5.0))


def test_without_valid_rows_nothing_changes(kit):
    policy = kit.policy()
    learner = kit.learner(policy)
    before = policy.weights()
    fragments = kit.fragments(policy)
    result = learner.update(fragments, version=9, steps_trained=0)
    assert result.trained == 0 and result.dropped == {"stale": sum(map(len, fragments))}
    assert result.metrics["learner/steps"] == 0
    assert learner.update([], version=9, steps_trained=0).trained == 0
    assert not changed(before, policy.weights())


def test_a_single_valid_row_is_enough(kit):
    policy = kit.policy(**LSTM)
    fragments = kit.fragments(policy, steps=64)
    for f in fragments:
        f.by_policy[:] = False
    fragments[1].by_policy[11] = True
    before = policy.weights()
    result = kit.learner(policy, epochs=2).update(fragments, version=0, steps_trained=0)
    assert result.trained == 1 and result.metrics["learner/steps"] == 2
    assert all(np.isfinite(v) for v in result.metrics.values())
    assert changed(before, policy.weights())


# ---------------------------------------------------------------------------------- β, schedules, values


def test_beta_follows_the_kl_of_the_last_epoch_within_its_bounds(kit):
    policy = kit.policy()
    learner = kit.learner(policy, use_kl_loss=True, kl_coeff=0.2, lr=1e-9)
    still = learner.update(kit.fragments(policy), version=0, steps_trained=0).metrics
    assert still["learner/kl"] < 0.005 and learner.kl_coeff == pytest.approx(0.1)
    assert still["learner/kl_coeff"] == learner.kl_coeff
    for _ in range(12):
        learner.update(kit.fragments(policy), version=0, steps_trained=0)
    assert learner.kl_coeff == 1e-4
    policy = kit.policy()
    learner = kit.learner(policy, use_kl_loss=True, kl_coeff=90.0, kl_target=1e-4, lr=0.1)
    moved = learner.update(kit.fragments(policy), version=0, steps_trained=0).metrics
    assert moved["learner/kl"] > 2e-4 and learner.kl_coeff == 100.0


def test_an_update_reports_its_numbers(kit):
    policy = kit.policy()
    metrics = kit.learner(policy).update(kit.fragments(policy), version=0, steps_trained=0).metrics
    names = "policy_loss vf_loss entropy kl kl_coeff clip_fraction grad_norm lr explained_variance ratio_max_first"
    assert {f"learner/{name}" for name in [*names.split(), "skipped_steps", "steps"]} <= metrics.keys()
    assert {"lag/mean", "lag/max"} <= metrics.keys()
    assert metrics["learner/entropy"] == pytest.approx(np.log(3), abs=0.01)
    assert metrics["learner/grad_norm"] > 0 and metrics["learner/lr"] == 1e-3


def test_the_kl_is_that_of_the_last_epoch(kit):
    def kl(epochs):
        policy = kit.policy()
        learner = kit.learner(policy, epochs=epochs, minibatch_size=10_000, lr=1e-2)
        return learner.update(kit.fragments(policy), version=0, steps_trained=0).metrics["learner/kl"]

    assert kl(1) == 0  # measured before the only step
    assert 0 < kl(2) < kl(4)


def test_without_kl_loss_the_kl_is_still_measured(kit):
    policy = kit.policy()
    learner = kit.learner(policy, lr=1e-2)
    metrics = learner.update(kit.fragments(policy), version=0, steps_trained=0).metrics
    assert metrics["learner/kl"] > 0 and metrics["learner/kl_coeff"] == 0


def test_schedules_follow_the_steps_trained_on(kit):
    policy = kit.policy()
    learner = kit.learner(policy, lr=[(0, 1e-3), (1000, 0.0)], clip_param=[(0, 0.2), (1000, 0.1)])
    fragments = kit.fragments(policy)
    half = learner.update(fragments, version=0, steps_trained=500).metrics
    assert half["learner/lr"] == pytest.approx(5e-4) and half["learner/clip_param"] == pytest.approx(0.15)
    before = policy.weights()
    learner.update(fragments, version=0, steps_trained=2000)
    assert not changed(before, policy.weights())


def test_normalised_values_learn_large_targets(kit):
    def error(normalize):
        policy = kit.policy()
        learner = kit.learner(policy, normalize_values=normalize, gamma=0.5, epochs=10)
        for i in range(6):
            fragments = kit.fragments(policy, seed=i)
            for f in fragments:
                f.rewards[:] = 1000.0
            metrics = learner.update(fragments, version=0, steps_trained=0).metrics
        assert metrics["learner/target_mean"] > 1000
        return abs(metrics["learner/value_mean"] - 2000)

    assert error(True) < 200
    assert error(False) > 1000


def test_constant_targets_leave_out_the_explained_variance(kit):
    policy = kit.policy()
    fragments = kit.fragments(policy, steps=8, length=1)
    for f in fragments:
        f.rewards[:], f.terminated = 1.0, True
    metrics = kit.learner(policy).update(fragments, version=0, steps_trained=0).metrics
    assert "learner/explained_variance" not in metrics
    assert all(np.isfinite(v) for v in metrics.values())


def test_the_configuration_must_be_resolved(kit):
    with pytest.raises(ConfigError, match=r"algorithm\.epochs"):
        kit.learner(kit.policy(), epochs=None)


def test_fragments_are_not_changed(kit):
    policy = kit.policy(**LSTM)
    fragments = kit.fragments(policy)
    kept = copy.deepcopy(fragments)
    kit.learner(policy, normalize_values=True).update(fragments, version=0, steps_trained=0)
    for a, b in zip(fragments, kept, strict=True):
        for name in ("actions", "logp", "dist", "rewards", "state_in"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
        assert np.array_equal(a.obs[""], b.obs[""])
