"""Settings of the loss on late rows, of the critic, of when an update ends, and of recurrent states."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tetherl.algorithms import ppo_update
from tetherl.algorithms.alarms import alarms
from tetherl.algorithms.preparation import pass_table

LSTM = {"use_lstm": True, "lstm_cell_size": 16}
ONE_STEP = {"minibatch_size": 10_000, "epochs": 1, "grad_clip": None}


def weights(learner) -> np.ndarray:
    return np.concatenate([w.ravel() for k, w in learner.policy.weights().items() if not k.startswith("value_")])


def gradient(learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters()])


def late(fragments, versions=0):
    for f in fragments:
        f.versions[:] = versions
    return fragments


# ---------------------------------------------------------------------------------- the three losses


def test_when_actor_and_learner_are_the_same_all_losses_have_the_same_gradient(kit):
    def of(loss):
        policy = kit.policy(**LSTM)
        learner = kit.learner(policy, loss=loss, max_lag=8, lr=0.0, **ONE_STEP)
        # The rows are old, but the policy has not changed: behaviour, prox and the learning policy are one.
        learner.update(kit.fragments(policy, version=0), version=4, steps_trained=0)
        return gradient(learner)

    reference = of("lag_scaled")
    assert reference.abs().max() > 1e-3
    for loss in ("plain", "decoupled"):
        assert torch.allclose(of(loss), reference, atol=1e-6)


def test_on_fresh_rows_lag_scaled_is_plain_to_the_bit(kit):
    def of(loss):
        policy = kit.policy()
        learner = kit.learner(policy, loss=loss, clip_param=0.02, lr=1e-2)
        learner.update(kit.fragments(policy), version=0, steps_trained=0)
        return weights(learner)

    assert np.array_equal(of("lag_scaled"), of("plain"))


def drifted(kit, **settings):
    """A learner whose policy is no longer the one that acted, and what that one played."""
    policy = kit.policy(seed=1)
    fragments = kit.fragments(policy)
    learner = kit.learner(policy, lr=3e-2, **settings)
    for _ in range(3):
        learner.update(kit.fragments(policy, seed=5), version=0, steps_trained=0)
    return learner, fragments


def test_decoupled_weighs_rows_and_its_first_ratios_are_1(kit, monkeypatch):
    learner, fragments = drifted(kit, loss="decoupled", max_lag=4, weight_cap=1.1)
    seen = []
    step = ppo_update.Update._step
    monkeypatch.setattr(ppo_update.Update, "_step", lambda self, m, **k: seen.append(self) or step(self, m, **k))
    metrics = learner.update(fragments, version=4, steps_trained=0).metrics
    update = seen[0]
    behaviour, prox = update.prepared.logp, update.prepared.prox_logp
    expected = (prox - behaviour).exp().clamp(max=1.1)
    assert torch.allclose(update.table[update.column["weight"]], expected)
    assert torch.equal(update.table[update.column["centre"]], prox)
    assert expected.min() < 0.9 and expected.max() == pytest.approx(1.1)
    assert metrics["learner/weight_max"] == pytest.approx(1.1) and 0 < metrics["learner/ess"] < 1
    assert "learner/outside_clip_first" not in metrics
    assert torch.unique(update.table[update.column["epsilon"]]).tolist() == pytest.approx([0.2])


def test_the_weight_cap_changes_what_is_learned(kit):
    def of(cap):
        learner, fragments = drifted(kit, loss="decoupled", max_lag=4, weight_cap=cap)
        learner.update(fragments, version=4, steps_trained=0)
        return weights(learner)

    assert not np.array_equal(of(10.0), of(0.5))


@pytest.mark.parametrize(("loss", "epsilons"), [("plain", {0.2}), ("lag_scaled", {0.2, 0.36, 0.8})])
def test_epsilon_by_lag(kit, monkeypatch, loss, epsilons):
    policy = kit.policy()
    fragments = kit.fragments(policy, steps=64)
    for f in fragments:
        f.versions[:] = 0
        f.versions[1], f.versions[2] = 16, 12  # lag 0 and 4; the others 16
    seen = []
    step = ppo_update.Update._step
    monkeypatch.setattr(ppo_update.Update, "_step", lambda self, m, **k: seen.append(self) or step(self, m, **k))
    kit.learner(policy, loss=loss, max_lag=16).update(fragments, version=16, steps_trained=0)
    found = {round(float(e), 6) for e in seen[0].table[seen[0].column["epsilon"]]}
    assert found == epsilons


# ---------------------------------------------------------------------------------- the critic, rewards


def test_a_clamped_value_error_has_no_gradient(kit):
    def of(**settings):
        policy = kit.policy()
        fragments = kit.fragments(policy)
        for f in fragments:
            f.rewards[:] = 50.0
        learner = kit.learner(policy, lr=0.0, **ONE_STEP, **settings)
        metrics = learner.update(fragments, version=0, steps_trained=0).metrics
        return float(learner.policy.value_head.weight.grad.abs().max()), metrics

    plain, _ = of()
    clamped, metrics = of(vf_clip="clamped_error")
    assert plain > 1 and clamped == 0
    assert metrics["learner/vf_loss"] == pytest.approx(10.0) and metrics["learner/vf_clip_fraction"] == 1


@pytest.mark.parametrize("normalize", [False, True])
def test_values_start_inside_their_clip(kit, normalize):
    policy = kit.policy()
    learner = kit.learner(
        policy, vf_clip="clipped_value", vf_clip_param=1e-3, normalize_values=normalize, lr=0.0, **ONE_STEP
    )
    for seed in range(2):  # the second batch moves statistics that are there already
        metrics = learner.update(kit.fragments(policy, seed=seed), version=0, steps_trained=0).metrics
        assert metrics["learner/vf_clip_fraction"] == 0


def test_rewards_are_scaled_then_clipped_for_learning_only(kit):
    policy = kit.policy()
    fragments = kit.fragments(policy)
    kept = copy.deepcopy(fragments)

    def targets(**settings):
        learner = kit.learner(policy, lr=0.0, lambda_=0.0, gamma=1e-9, **settings)
        return learner.update(fragments, version=0, steps_trained=0).metrics["learner/target_mean"]

    rewards = np.concatenate([f.rewards for f in fragments])
    assert targets() == pytest.approx(rewards.mean(), abs=1e-5)
    assert targets(reward_scale=3.0) == pytest.approx(3 * rewards.mean(), abs=1e-5)
    expected = np.clip(3 * rewards, -1.5, 1.5).mean()
    assert targets(reward_scale=3.0, reward_clip=1.5) == pytest.approx(expected, abs=1e-5)
    assert all(np.array_equal(a.rewards, b.rewards) for a, b in zip(fragments, kept, strict=True))


def test_an_infinite_reward_is_not_saved_by_the_clip(kit):
    policy = kit.policy()
    fragments = kit.fragments(policy)
    fragments[0].rewards[0] = np.inf
    result = kit.learner(policy, reward_clip=1.0).update(fragments, version=0, steps_trained=0)
    assert result.dropped == {"quarantined": len(fragments[0])}


# ---------------------------------------------------------------------------------- when an update ends


def test_an_update_ends_when_the_policy_has_moved_far_enough(kit):
    def of(target):
        policy = kit.policy()
        learner = kit.learner(policy, lr=2e-2, epochs=8, target_kl=target)
        return learner.update(kit.fragments(policy), version=0, steps_trained=0).metrics

    free, stopped, never = of(None), of(0.005), of(1e9)
    assert free["learner/epochs"] == never["learner/epochs"] == 8
    assert stopped["learner/epochs"] < 8 and stopped["learner/steps"] < free["learner/steps"]
    assert 0 < stopped["learner/kl_k3"] < free["learner/kl_k3"] and "learner/kl" in stopped
    assert never["learner/kl"] == pytest.approx(free["learner/kl"])


def test_an_update_that_ends_before_its_first_step_changes_nothing(kit):
    policy = kit.policy()
    learner = kit.learner(policy, target_kl=1e-30, lr=1e-2, epochs=2)
    # Within the first epoch the first minibatch has moved by nothing, the second by something.
    metrics = learner.update(kit.fragments(policy), version=0, steps_trained=0).metrics
    assert metrics["learner/steps"] <= 2 and metrics["learner/epochs"] == 1


def test_which_minibatches_the_kl_is_measured_over(kit):
    def of(measure):
        policy = kit.policy()
        learner = kit.learner(policy, lr=1e-2, epochs=6, kl_measure=measure)
        return learner.update(kit.fragments(policy), version=0, steps_trained=0).metrics

    every, last_epoch = of("all"), of("last_epoch")
    last = of("last_minibatch")
    assert 0 < every["learner/kl"] < last_epoch["learner/kl"]
    assert last["learner/kl"] != last_epoch["learner/kl"]
    # β follows the one that was asked for: a target for which only one of the two is too much.
    between = (every["learner/kl"] + last_epoch["learner/kl"]) / 4
    for measure, factor in (("all", 1.0), ("last_epoch", 1.5)):
        learner = kit.learner(
            kit.policy(), lr=1e-2, epochs=6, kl_measure=measure, use_kl_loss=True, kl_coeff=1e-3, kl_target=between
        )
        learner.update(kit.fragments(learner.policy), version=0, steps_trained=0)
        assert learner.kl_coeff == pytest.approx(factor * 1e-3)
    assert last_epoch["learner/kl_k3"] == pytest.approx(last_epoch["learner/kl"], rel=0.5)
    assert last_epoch["learner/kl_k2"] == pytest.approx(last_epoch["learner/kl"], rel=0.5)


def test_minibatches_in_the_order_of_arrival(kit, monkeypatch):
    def rows(shuffle, **model):
        policy = kit.policy(**model)
        seen = []
        step = ppo_update.Update._step
        monkeypatch.setattr(
            ppo_update.Update, "_step", lambda self, m, **k: seen.append(m.trained) or step(self, m, **k)
        )
        learner = kit.learner(policy, shuffle=shuffle, epochs=1)
        learner.update(kit.fragments(policy), version=0, steps_trained=0)
        monkeypatch.undo()
        return np.concatenate(seen).tolist()

    for model in ({}, LSTM):
        arrived = rows(False, **model)
        assert arrived == sorted(arrived)
        assert rows(True, **model) != arrived


# ---------------------------------------------------------------------------------- recurrent states


def test_a_pass_is_cut_where_burn_in_begins():
    lengths = np.array([10, 3, 9])
    assert pass_table(lengths, 4, 0)[:, 3].tolist() == [0, 4, 8, 10, 13, 17, 21]
    assert pass_table(lengths, 4, 8)[:, 3].tolist() == [0, 4, 8, 10, 13, 17, 21]
    table = pass_table(lengths, 4, 3)
    assert table[:, 3].tolist() == [0, 1, 4, 5, 8, 10, 13, 14, 17, 18, 21]
    assert table[:, 2].tolist() == [1, 3, 1, 3, 2, 3, 1, 3, 1, 3, 1]
    assert table[:, 2].sum() == lengths.sum()
    assert table[:, 0].tolist() == [0] * 5 + [1] + [2] * 5
    assert pass_table(lengths, 4, 7)[:, 3].tolist() == table[:, 3].tolist()


@pytest.mark.parametrize("burn_in", [1, 3, 8, 11, 100])
def test_burn_in_reaches_the_state_of_the_whole_pass_while_the_network_is_the_same(kit, burn_in):
    def of(burn_in):
        policy = kit.policy(**LSTM)
        learner = kit.learner(policy, burn_in=burn_in, lr=0.0, **ONE_STEP)
        metrics = learner.update(
            kit.fragments(policy, length=60, fragment_length=45), version=0, steps_trained=0
        ).metrics
        assert metrics["learner/ratio_max_first"] <= 1e-4
        return gradient(learner)

    # State and therefore gradient are the same; that none flows into the rows before is what makes it so.
    assert torch.allclose(of(burn_in), of(0), atol=1e-6)


def test_burn_in_refreshes_states_of_a_network_that_has_moved(kit, monkeypatch):
    """After some steps the stored chunk states are those of an old network; burn-in comes nearer to the new ones."""
    policy = kit.policy(**LSTM)
    learner = kit.learner(policy, burn_in=16, lr=2e-2, epochs=3, entropy_coeff=0.01)
    fragments = kit.fragments(policy, length=100, fragment_length=64, steps=512)
    far, near = [], []
    forward = ppo_update.Update._burn_in

    def watch(self, ids, state):
        # The states where burn-in begins, as the network is now, from a pass of its own.
        fresh = copy.copy(self.prepared)
        ppo_update.refresh(self.policy, fresh, self.learner.recipe, advantages=False, states=True)
        warm = forward(self, ids, state)
        exact = forward(self, ids, fresh.chunk_states[torch.from_numpy(ids)])
        far.append(float((state - fresh.chunk_states[torch.from_numpy(ids)]).abs().mean()))
        near.append(float((warm - exact).abs().mean()))
        return warm

    monkeypatch.setattr(ppo_update.Update, "_burn_in", watch)
    learner.update(fragments, version=0, steps_trained=0)
    assert far[0] == 0 and far[-1] > 1e-3
    assert np.mean(near[1:]) < 0.5 * np.mean(far[1:])


def test_stored_states_are_used_where_fragments_carry_them(kit):
    def chunk_states(source, states):
        policy = kit.policy(**LSTM)
        fragments = kit.fragments(policy, length=40, fragment_length=20)
        for i, f in enumerate(fragments):
            if states and i != 1:
                f.state_every = 8
                f.states = np.full((-(-len(f) // 8), policy.state_size), 0.5, np.float32)
        learner = kit.learner(policy, state_source=source, lr=0.0, **ONE_STEP)
        kept = []
        forward = ppo_update.Update._forward

        def watch(self, minibatch):
            kept.append((self.prepared.chunks, self.prepared.chunk_states))
            return forward(self, minibatch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo_update.Update, "_forward", watch)
            learner.update(fragments, version=0, steps_trained=0)
        return kept[0]

    chunks, stored = chunk_states("stored", True)
    _, recomputed = chunk_states("recomputed", True)
    assert torch.equal(chunk_states("stored", False)[1], recomputed)
    carried = torch.from_numpy(chunks[:, 0] != 1)
    assert (stored[carried] == 0.5).all()
    assert torch.equal(stored[~carried], recomputed[~carried]) and (recomputed != 0.5).any()


@pytest.mark.parametrize("setting", ["recompute_advantages", "state_refresh"])
def test_per_epoch_makes_a_pass_before_each_epoch_but_the_first(kit, monkeypatch, setting):
    policy = kit.policy(**LSTM)
    calls = []
    refresh = ppo_update.refresh

    def watch(policy, prepared, recipe, **what):
        before = prepared.targets.clone(), prepared.chunk_states.clone(), prepared.prox_logp.clone()
        refresh(policy, prepared, recipe, **what)
        calls.append([torch.equal(a, getattr(prepared, k)) for a, k in zip(before, keys, strict=True)])

    keys = ("targets", "chunk_states", "prox_logp")
    monkeypatch.setattr(ppo_update, "refresh", watch)
    learner = kit.learner(policy, epochs=3, lr=1e-2, normalize_values=True, **{setting: "per_epoch"})
    learner.update(kit.fragments(policy), version=0, steps_trained=0)
    unchanged = [False, True, True] if setting == "recompute_advantages" else [True, False, True]
    assert calls == [unchanged] * 2


def test_late_recurrent_rows_of_several_versions_start_from_states_of_the_network_that_learns(kit, monkeypatch):
    """Rows of an episode by three networks; the chunk in its middle starts where the newest would have come to."""
    policy = kit.policy(**LSTM)
    fragments = late(kit.fragments(policy, length=40, fragment_length=24, steps=96))
    for f in fragments:
        f.versions[3:6], f.versions[6:] = 1, 2
    learner = kit.learner(policy, max_lag=4, lr=1e-2)
    learner.update(kit.fragments(policy, seed=3), version=0, steps_trained=0)  # the policy moves on
    f = fragments[0]
    rows = {k: torch.from_numpy(v[:8]) for k, v in f.obs.items()}
    prev = torch.from_numpy(np.concatenate([np.zeros_like(f.actions[:1]), f.actions[:7]]))
    has_prev = torch.arange(8) > 0
    with torch.no_grad():
        reached = policy(rows, prev, torch.zeros(8), has_prev, [8], torch.zeros(1, policy.state_size)).state[0]
    seen = []
    step = ppo_update.Update._step
    monkeypatch.setattr(
        ppo_update.Update, "_step", lambda self, m, **k: seen.append(self.prepared.chunk_states) or step(self, m, **k)
    )
    result = learner.update(fragments, version=4, steps_trained=0)
    assert torch.allclose(seen[0][1], reached, atol=1e-6)
    assert result.metrics["lag/min"] == 2 and result.metrics["lag/max"] == 4
    assert result.dropped == {}


# ---------------------------------------------------------------------------------- alarms

QUIET = {
    "lag/mean": 2.0,
    "learner/ratio_max_first": 1e-4,
    "learner/outside_clip_first": 0.3,
    "learner/kl_behaviour": 0.15,
    "learner/ess": 0.5,
    "learner/vf_clip_fraction": 0.2,
}


def test_alarms_have_their_limits(kit):
    config = kit.config(max_lag=8)
    assert alarms(QUIET, config, 90, {"stale": 5, "not_policy": 5}) == {}
    assert alarms({}, config, 0, {}) == {}
    for change, name, words in (
        ({"learner/outside_clip_first": 0.31}, "outside_clip", ["31%", "2.0 versions"]),
        ({"learner/kl_behaviour": 0.16}, "kl_behaviour", ["0.16", "0.15"]),
        ({"lag/mean": 1.9}, "kl_behaviour", ["0.15"]),
        ({"learner/ratio_max_first": 0.002}, "ratio_first", ["0.002", "recurrent states"]),
        ({"learner/ess": 0.49}, "ess", ["49%", "lag_scaled"]),
        ({"learner/vf_clip_fraction": 0.21}, "vf_clip", ["21%", "vf_clip_param"]),
    ):
        ((found, text),) = alarms(QUIET | change, config, 90, {"stale": 10}).items()
        assert found == name and all(word in text for word in words)
    ((found, text),) = alarms(QUIET, config, 89, {"stale": 10, "not_policy": 1}).items()
    assert found == "dropped" and "11%" in text and "max_lag, 8" in text


def test_an_alarm_is_said_once_and_again_after_it_was_over(kit):
    policy = kit.policy()
    learner = kit.learner(policy, max_lag=4)
    said = []
    for old in (True, True, False, True):
        fragments = kit.fragments(policy)
        for f in fragments:
            f.versions[: len(f) // 2] = -9 if old else 0
        result = learner.update(fragments, version=0, steps_trained=0)
        said.append([text for text in result.warnings if "were not trained on" in text])
        assert result.metrics["learner/alarms"] == float(old)
    assert [len(texts) for texts in said] == [1, 0, 0, 1]
