"""Environments whose answer is known exactly: the first thing to look at when learning goes wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tetherl.errors import TetherlError
from tetherl.testing import probes

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["cases"]
    if case["kind"] == "probe"
}


def vector(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


@pytest.mark.parametrize("normalize", [False, True])
def test_p1_the_value_of_a_certain_reward(train, normalize):
    run = train(probes.CertainReward, steps=3000, normalize_values=normalize)
    assert run.values(vector(0)) == pytest.approx([1.0], abs=0.02)


def test_p2_values_follow_the_observation(train):
    run = train(probes.SeenReward, steps=3000)
    assert run.values(vector(-1), vector(1)) == pytest.approx([-1.0, 1.0], abs=0.03)


@pytest.mark.parametrize("fragment_length", [1, 2])
@pytest.mark.parametrize("lam", [0.0, 0.95])
def test_p3_a_reward_at_the_end_is_discounted(train, fragment_length, lam):
    late_reward(train, CASES["probe_03_two_step"], lambda_=lam, rollouts={"fragment_length": fragment_length})


def test_p4_the_better_action_wins(train):
    run = train(probes.BetterAction, steps=4000)
    logits, values = run.outputs(vector(0))
    assert torch.softmax(logits, -1)[0, 1] > 0.98
    assert values == pytest.approx([1.0], abs=0.1)


def test_p5_the_observation_tells_the_action(train):
    run = train(probes.MatchSign, steps=4000)
    assert run.greedy == 1.0 and run.sampled > 0.95
    assert run.values(vector(-1), vector(1)) == pytest.approx([1.0, 1.0], abs=0.1)


def test_p8_memory_solves_what_no_memory_can(train):
    settings = {"train_batch_size": 1024, "minibatch_size": 256, "epochs": 6, "lr": [[0, 1e-3], [30_000, 0.0]]}
    settings["rollouts"] = {"envs_per_worker": 16, "fragment_length": 64}
    run = train(probes.Cue, steps=30_000, model={"use_lstm": True, "lstm_cell_size": 32}, **settings)
    assert run.greedy >= 0.95
    assert abs(train(probes.Cue, steps=10_000, **settings).greedy) < 0.5


def test_p10_memory_of_actions_and_rewards_finds_the_hidden_arm(train):
    settings = {"train_batch_size": 1280, "minibatch_size": 128, "epochs": 6}
    settings["rollouts"] = {"envs_per_worker": 16, "fragment_length": 80}
    inputs = {"lstm_use_prev_action": True, "lstm_use_prev_reward": True}
    run = train(probes.HiddenArm, steps=40_000, model={"use_lstm": True, "lstm_cell_size": 32} | inputs, **settings)
    assert run.greedy > 9.2 and run.sampled > 9.2
    without = train(probes.HiddenArm, steps=10_000, **settings)
    assert 4 < without.sampled < 6


def test_p11_only_valid_actions_are_taken(train):
    # An invalid action raises; a mask that is not used in the loss shows in the ratios before the first step.
    run = train(probes.OnlyValid, steps=3000)
    assert run.greedy == pytest.approx(1.0) and run.sampled == pytest.approx(1.0)
    with pytest.raises(TetherlError, match="is not valid here"):
        train(probes.OnlyValid, steps=3000, env_config={"tell_mask": False})


def test_p12_two_parts_of_an_action_are_learned_together(train):
    run = train(probes.MatchPair, steps=6000, entropy_coeff=0.01)
    # The policy is nearly uniform at the start, its entropy therefore log 12.
    assert run.metrics[0]["learner/entropy"] == pytest.approx(math.log(12), abs=0.05)
    assert run.greedy == 1.0 and run.sampled > 0.9


@pytest.mark.slow
def test_p13_nine_keys_are_read_off_an_image(train):
    filters = [[16, [10, 10], 10], [64, [6, 8], 1]]
    run = train(
        probes.BrightCells,
        steps=20_000,
        train_batch_size=512,
        lr=[[0, 2e-3], [20_000, 0.0]],
        model={"fcnet_hiddens": None, "conv_filters": filters},
    )
    assert run.metrics[0]["learner/entropy"] == pytest.approx(9 * math.log(2), abs=0.05)
    assert run.metrics[0]["episode_return_mean"] == pytest.approx(0.5, abs=0.05)
    assert run.sampled >= 0.95


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.01])
def test_p14_bounded_actions_are_scaled(train, entropy_coeff):
    run = train(probes.HitTarget, steps=6000, train_batch_size=512, entropy_coeff=entropy_coeff)
    assert run.greedy > -0.05


@pytest.mark.slow
def test_p15_old_experience_from_a_changing_policy_is_as_good(late_cue_score):
    assert late_cue_score(weights_lag=4) >= 0.95


# The probes with golden numbers: P6, P7, P3, P9.


def time_limit(train, case):
    """P6, and the same with the limit taken for an end."""
    gamma, expected = case["inputs"]["gamma"], case["expected"]
    assert expected["V"] == pytest.approx(1 / (1 - gamma))
    wrong = np.mean([(1 - gamma**k) / (1 - gamma) for k in range(1, 11)])
    assert expected["V_if_truncation_treated_as_termination"] == pytest.approx(wrong)
    settings = {"steps": 8000, "gamma": gamma, "lambda_": case["inputs"]["lam"], "normalize_values": True}
    run = train(probes.TimeLimit, **settings)
    assert run.values(vector(0)) == pytest.approx([expected["V"]], abs=0.3)
    run = train(probes.TimeLimit, env_config={"limit_is_end": True}, **settings)
    assert run.values(vector(0)) == pytest.approx([wrong], abs=0.3)


def final_observation(train, case):
    """P7: the bootstrap looks at the final observation, not at the next episode's first."""
    run = train(
        probes.TwoTimeLimits,
        steps=12_000,
        gamma=case["inputs"]["gamma"],
        normalize_values=True,
        vf_loss_coeff=1.0,
    )
    assert run.values(*range(11)) == pytest.approx(case["expected"]["V_by_obs"], rel=0.05)


def late_reward(train, case, **settings):
    """P3."""
    run = train(probes.LateReward, steps=4000, gamma=case["inputs"]["gamma"], **settings)
    assert run.values(vector(0), vector(1)) == pytest.approx(case["expected"]["V_by_obs"], abs=0.03)


def previous_action(train, case):
    """P9: with the previous action as input all is won, without it not even half."""
    best, memoryless = (case["expected"][k] for k in ("optimal_return_with_prev_action", "best_return_memoryless"))
    run = train(probes.Alternate, steps=8000, train_batch_size=512, model={"lstm_use_prev_action": True})
    assert run.greedy == best and run.sampled > 0.9 * best
    run = train(probes.Alternate, steps=5000)
    assert run.greedy <= memoryless and run.sampled < memoryless + 0.7


GOLDEN = {
    "probe_01_truncation": time_limit,
    "probe_02_final_obs": final_observation,
    "probe_03_two_step": late_reward,
    "probe_04_no_prev_action": previous_action,
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_golden_probe(train, case):
    GOLDEN[case](train, CASES[case])
