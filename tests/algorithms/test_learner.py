from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tetherl.errors import CheckpointError, TrainingError

LSTM = {"use_lstm": True, "lstm_cell_size": 8}
SETTINGS = {"use_kl_loss": True, "normalize_values": True, "entropy_coeff": 0.01}


def train(kit, learner, updates) -> list[dict]:
    results = []
    for i in updates:
        fragments = kit.fragments(learner.policy, seed=i, version=i, steps=128)
        results.append(learner.update(fragments, version=i, steps_trained=128 * i).metrics)
    return results


# ---------------------------------------------------------------------------------- exact continuation


@pytest.mark.parametrize("model", [{}, LSTM])
def test_save_load_train_equals_training_on_to_the_bit(kit, model):
    learner = kit.learner(kit.policy(**model), **SETTINGS)
    train(kit, learner, range(3))
    arrays, meta = learner.state()
    frozen = {k: v.copy() for k, v in arrays.items()}
    expected = train(kit, learner, range(3, 6))
    assert all(np.array_equal(arrays[k], frozen[k]) for k in arrays)  # a state is a copy

    again = kit.learner(kit.policy(seed=9, **model), seed=9, **SETTINGS)
    again.load_state(arrays, json.loads(json.dumps(meta)))
    assert train(kit, again, range(3, 6)) == expected
    ours, theirs = learner.policy.weights(), again.policy.weights()
    assert all(np.array_equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("forgotten", ["adam/exp_avg/", "shuffle", "kl_coeff", "policy/value_"])
def test_each_part_of_the_state_is_needed(kit, forgotten):
    learner = kit.learner(kit.policy(), **SETTINGS)
    train(kit, learner, range(3))
    arrays, meta = learner.state()
    expected = train(kit, learner, range(3, 5))
    fresh_arrays, fresh_meta = kit.learner(kit.policy(seed=9), seed=9, **SETTINGS).state()
    for key in arrays:
        if key.startswith(forgotten):
            arrays[key] = fresh_arrays.get(key, np.zeros_like(arrays[key]))
    if forgotten in meta:
        meta[forgotten] = fresh_meta[forgotten]
    again = kit.learner(kit.policy(seed=9), seed=9, **SETTINGS)
    again.load_state(arrays, meta)
    assert train(kit, again, range(3, 5)) != expected


def test_a_fresh_learner_can_be_saved_and_loaded(kit):
    learner = kit.learner(kit.policy(), **SETTINGS)
    again = kit.learner(kit.policy(seed=3), seed=3, **SETTINGS)
    again.load_state(*learner.state())
    assert train(kit, again, range(2)) == train(kit, learner, range(2))


def test_a_state_that_does_not_fit_is_refused_by_name(kit):
    learner = kit.learner(kit.policy())
    train(kit, learner, range(1))
    arrays, meta = learner.state()
    with pytest.raises(CheckpointError, match="kl_coeff is missing"):
        learner.load_state(arrays, {k: v for k, v in meta.items() if k != "kl_coeff"})
    with pytest.raises(CheckpointError, match="shuffle is missing"):
        learner.load_state({k: v for k, v in arrays.items() if k != "shuffle"}, meta)
    with pytest.raises(CheckpointError, match=r"adam/exp_avg/.* has shape"):
        kit.learner(kit.policy(fcnet_hiddens=[5])).load_state(arrays, meta)
    other = {k: v for k, v in arrays.items() if not k.startswith("adam")}
    with pytest.raises(CheckpointError):
        kit.learner(kit.policy(fcnet_hiddens=[5])).load_state(other, meta | {"adam_steps": 0})


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(kit):
    def numbers(seed):
        return train(kit, kit.learner(kit.policy(**LSTM), seed=seed, **SETTINGS), range(3))

    assert numbers(0) == numbers(0)
    assert numbers(0) != numbers(1)


def test_the_global_random_state_is_left_alone(kit):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train(kit, kit.learner(kit.policy(**LSTM), **SETTINGS), range(1))
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------------------- bad numbers


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_reward_costs_its_fragment_and_the_run_goes_on(kit, bad):
    learner = kit.learner(kit.policy(), normalize_values=True)
    fragments = kit.fragments(learner.policy)
    fragments[2].rewards[3] = bad
    result = learner.update(fragments, version=0, steps_trained=0)
    assert result.dropped == {"quarantined": len(fragments[2])}
    assert result.trained == sum(map(len, fragments)) - len(fragments[2])
    (warning,) = result.warnings
    assert fragments[2].episode_id in warning and "reward of row 3" in warning
    assert result.metrics["learner/quarantined_fragments"] == 1
    assert all(np.isfinite(v) for v in result.metrics.values())
    assert all(np.isfinite(v).all() for v in learner.policy.weights().values())
    assert learner.update(kit.fragments(learner.policy), version=0, steps_trained=0).warnings == []


def test_the_rest_learns_as_if_the_broken_fragment_had_never_been(kit):
    def weights(poison):
        learner = kit.learner(kit.policy(**LSTM), normalize_values=True)
        fragments = kit.fragments(learner.policy)
        fragments[-1].rewards[0] = np.inf
        learner.update(fragments if poison else fragments[:-1], version=0, steps_trained=0)
        return learner.policy.weights()

    with_it, without = weights(True), weights(False)
    assert all(np.allclose(with_it[k], without[k], atol=1e-6) for k in with_it)


def test_when_nothing_is_left_the_update_is_skipped_and_the_tenth_time_is_an_error(kit):
    learner = kit.learner(kit.policy())
    before = learner.policy.weights()
    fragments = kit.fragments(learner.policy)
    for f in fragments:
        f.obs[""][0] = np.nan
    for i in range(9):
        result = learner.update(fragments, version=0, steps_trained=0)
        assert result.trained == 0 and result.metrics["learner/skipped_steps"] == i + 1
    with pytest.raises(TrainingError, match="observation of row 0"):
        learner.update(fragments, version=0, steps_trained=0)
    after = learner.policy.weights()
    assert all(np.array_equal(before[k], after[k]) for k in before)


def test_a_step_with_a_non_finite_loss_is_skipped_and_named(kit):
    learner = kit.learner(kit.policy(), epochs=1, minibatch_size=64)
    fragments = kit.fragments(learner.policy, steps=256)
    for f in fragments:
        f.rewards[:] = 1e25  # finite, but its square is not
    before = learner.policy.weights()
    result = learner.update(fragments, version=0, steps_trained=0)
    assert result.metrics["learner/skipped_steps"] == 4 and result.metrics["learner/steps"] == 0
    assert "learner/kl" not in result.metrics
    with pytest.raises(TrainingError, match="value loss"):
        for _ in range(3):
            learner.update(fragments, version=0, steps_trained=0)
    after = learner.policy.weights()
    assert all(np.array_equal(before[k], after[k]) for k in before)


def test_a_good_step_ends_a_row_of_skipped_ones(kit):
    learner = kit.learner(kit.policy(), epochs=1, minibatch_size=64)
    good = kit.fragments(learner.policy, steps=256)
    bad = kit.fragments(learner.policy, steps=256)
    for f in bad:
        f.rewards[:] = 1e25
    for _ in range(5):
        learner.update(bad, version=0, steps_trained=0)
        learner.update(good, version=0, steps_trained=0)
    assert learner.state()[1]["skipped_steps"] == 20


def test_a_non_finite_gradient_is_named_by_its_parameter(kit):
    learner = kit.learner(kit.policy())
    head = learner.policy.value_head.weight
    for p in learner.policy.parameters():
        p.grad = torch.zeros_like(p)
    assert learner.non_finite_gradient() is None
    head.grad[0, 0] = np.nan
    assert learner.non_finite_gradient() == "gradient of value_head.weight"
