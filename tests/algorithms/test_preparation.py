from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tetherl.algorithms import preparation
from tetherl.algorithms.preparation import Recipe, first_non_finite, prepare
from tetherl.data.batch import assemble
from tetherl.data.fragment import Fragment
from tetherl.models.policy import PolicyOutput
from tetherl.ops.distributions import Categorical

CPU = torch.device("cpu")


class ValueIsObservation:
    """A feed-forward policy of which everything is known: V(obs) = obs, two equally likely actions."""

    is_recurrent, state_size, dist = False, 0, Categorical(2)

    def __call__(self, obs, prev_action, prev_reward, has_prev, lengths, state):
        return PolicyOutput(torch.zeros(len(obs[""]), 2), obs[""][:, 0], None)

    def denormalize(self, values):
        return values


class ValueIsSum(ValueIsObservation):
    """A recurrent one: state and value are the sum of all observations of the episode so far."""

    is_recurrent, state_size = True, 1
    calls: list[int]

    def __init__(self):
        self.calls = []

    def __call__(self, obs, prev_action, prev_reward, has_prev, lengths, state):
        self.calls.append(len(obs[""]))
        sums = [s + torch.cumsum(o, 0) for s, o in zip(state, obs[""].split(lengths), strict=True)]
        values = torch.cat(sums)[:, 0]
        return PolicyOutput(torch.zeros(len(values), 2), values, torch.stack([s[-1] for s in sums]))


def fragment(obs, rewards, final_obs, *, terminated=False, t0=0, state_in=None, **changes) -> Fragment:
    n = len(rewards)
    values = {
        "obs": {"": np.array(obs, np.float32)[:, None]},
        "final_obs": None if final_obs is None else {"": np.array([final_obs], np.float32)},
        "actions": np.zeros((n, 1), np.int64),
        "logp": np.full(n, -np.log(2), np.float32),
        "dist": np.zeros((n, 2), np.float32),
        "rewards": np.array(rewards, np.float32),
        "versions": np.zeros(n, np.int64),
        "by_policy": np.ones(n, bool),
        "terminated": terminated,
        "truncated": False,
        "episode_id": "e",
        "t0": t0,
        "worker": 0,
        "state_in": None if state_in is None else np.array([state_in], np.float32),
        "prev_action": np.zeros(1, np.int64) if t0 else None,
    }
    return Fragment(**(values | changes))


def prepared(fragments, policy=None, *, gamma=0.9, lam=0.8, max_seq_len=4, **more):
    policy = policy or ValueIsObservation()
    batch, _, _ = assemble(fragments, version=0, max_lag=0, state_size=policy.state_size)
    return prepare(policy, batch, Recipe(gamma=gamma, lam=lam, max_seq_len=max_seq_len, device=CPU, **more))


def fragments_of(case: dict) -> list[Fragment]:
    """Golden streams may hold several episodes; a fragment holds one."""
    found, start = [], 0
    rewards, values, after = case["rewards"], case["values"], case["next_values"]
    for t, (terminated, truncated) in enumerate(zip(case["terminated"], case["truncated"], strict=True)):
        if terminated or truncated or t == len(rewards) - 1:
            rows = slice(start, t + 1)
            found.append(fragment(values[rows], rewards[rows], after[t], terminated=terminated, truncated=truncated))
            start = t + 1
    return found


@pytest.mark.parametrize(
    "name",
    [
        "gae_01_termination",
        "gae_02_truncation",
        "gae_03_both_flags",
        "gae_04_multi_episode",
        "gae_05_lambda0",
        "gae_06_lambda1",
    ],
)
def test_advantages_of_the_golden_streams(kit, name):
    case = kit.golden(name)
    result = prepared(fragments_of(case["inputs"]), gamma=case["inputs"]["gamma"], lam=case["inputs"]["lam"])
    assert result.advantages.numpy() == pytest.approx(case["expected"]["advantages"], rel=1e-5, abs=1e-6)
    assert result.targets.numpy() == pytest.approx(case["expected"]["value_targets"], rel=1e-5, abs=1e-6)


def test_advantages_of_two_interleaved_environments(kit):
    case = kit.golden("gae_07_time_major_two_envs")
    inputs, expected = case["inputs"], case["expected"]
    columns = [{k: [row[b] for row in v] for k, v in inputs.items() if isinstance(v, list)} for b in range(2)]
    fragments = fragments_of(columns[0]) + fragments_of(columns[1])
    result = prepared(fragments, gamma=inputs["gamma"], lam=inputs["lam"])
    wanted = [row[b] for b in range(2) for row in expected["advantages"]]
    assert result.advantages.numpy() == pytest.approx(wanted, rel=1e-5)


def test_a_lost_client_is_bootstrapped_at_the_last_observation_that_was_seen(kit):
    case = kit.golden("gae_09_client_lost")
    inputs, expected = case["inputs"], case["expected"]
    obs, final = inputs["values_of_obs"][:-1], inputs["values_of_obs"][-1]
    result = prepared([fragment(obs, inputs["rewards_received"], final)], gamma=inputs["gamma"], lam=inputs["lam"])
    assert len(result.advantages) == expected["transitions_kept"]
    assert result.advantages.numpy() == pytest.approx(expected["advantages"], rel=1e-5)


def test_the_value_after_a_truncation_is_that_of_the_final_observation():
    # One row: A = r + γ·V(final) - V. Not V(obs), not the next episode's first observation, not (V - r)/γ.
    result = prepared([fragment([2.0], [1.0], 10.0, truncated=True), fragment([-50.0], [0.0], 0.0)])
    assert result.advantages[0].item() == pytest.approx(1 + 0.9 * 10 - 2)


def test_the_recursion_stops_at_a_truncation_and_at_a_cut():
    first = fragment([1.0, 2.0], [1.0, 1.0], 3.0, truncated=True)
    alone = prepared([first]).advantages
    together = prepared([first, fragment([5.0], [1e6], 0.0)]).advantages[:2]
    assert torch.equal(alone, together)


def test_the_last_reward_of_every_fragment_is_learned():
    cut = [fragment([1.0, 2.0], [0.0, 7.0], 3.0), fragment([3.0], [5.0], None, terminated=True, t0=2)]
    targets = prepared(cut, lam=0.0).targets
    assert targets.tolist() == pytest.approx([0.9 * 2, 7 + 0.9 * 3, 5.0])


def test_with_lambda_1_cutting_an_episode_of_exact_values_changes_no_target():
    obs = [0.9**3, 0.9**2, 0.9, 1.0]  # exact values of a reward of 1 at the end
    whole = prepared([fragment(obs, [0, 0, 0, 1], None, terminated=True)], lam=1.0)
    parts = [
        fragment(obs[:2], [0, 0], obs[2]),
        fragment(obs[2:], [0, 1], None, terminated=True, t0=2),
    ]
    assert prepared(parts, lam=1.0).targets.tolist() == pytest.approx(whole.targets.tolist())


def test_context_rows_count_for_the_advantages_of_rows_before_them():
    def advantages(reward):
        late = np.array([0, -5, 0])  # versions; the learner is at 0 and takes no lag
        rows = fragment([1.0, 2.0, 3.0], [1.0, reward, 1.0], 4.0, versions=late)
        return prepared([rows]).advantages.tolist()

    a, b = advantages(0.0), advantages(1.0)
    assert b[0] - a[0] == pytest.approx(0.9 * 0.8)
    assert b[2] == a[2]


# ---------------------------------------------------------------------------------- recurrence


def test_states_are_handed_over_between_chunks_and_start_from_the_stored_state():
    policy = ValueIsSum()
    result = prepared(
        [fragment(range(1, 7), [0] * 6, 100.0), fragment([1, 1], [0, 0], 5.0, t0=9, state_in=1000.0)], policy
    )
    assert result.values.tolist() == [1, 3, 6, 10, 15, 21, 1001, 1002]
    assert result.chunks.tolist() == [[0, 0, 4, 0], [0, 4, 2, 4], [1, 0, 2, 6]]
    assert result.chunk_states[:, 0].tolist() == [0, 10, 1000]
    assert policy.calls == [6, 2, 2]  # first chunks together, second chunk, final observations


def test_the_final_observation_is_valued_with_the_state_after_the_last_row():
    result = prepared(
        [fragment(range(1, 7), [0] * 6, 100.0), fragment([1, 1], [0, 0], 5.0, t0=9, state_in=1000.0)],
        ValueIsSum(),
        lam=0.0,
    )
    assert result.targets[5].item() == pytest.approx(0.9 * (21 + 100))
    assert result.targets[7].item() == pytest.approx(0.9 * (1002 + 5))


@pytest.mark.parametrize("recurrent", [False, True])
def test_passes_in_slices_give_what_one_pass_gives(monkeypatch, recurrent):
    policy = ValueIsSum() if recurrent else ValueIsObservation()
    rng = np.random.default_rng(0)
    fragments = [fragment(rng.normal(size=n), rng.normal(size=n), 1.0) for n in (11, 3, 8, 1, 20, 5)]
    whole = prepared(fragments, policy)
    monkeypatch.setattr(preparation, "MIN_FORWARD_ROWS", 8)
    monkeypatch.setattr(preparation, "FORWARD_BYTES", 1)
    calls = len(policy.calls) if recurrent else 0
    sliced = prepared(fragments, policy)
    assert torch.equal(whole.values, sliced.values) and torch.equal(whole.targets, sliced.targets)
    if recurrent:
        assert torch.equal(whole.chunk_states, sliced.chunk_states)
        assert max(policy.calls[calls:]) < 8 + 4 and len(policy.calls) > 2 * calls


@pytest.fixture
def lstm(kit):
    policy = kit.policy(use_lstm=True, lstm_cell_size=16)
    return SimpleNamespace(policy=policy, fragments=kit.fragments(policy, fragment_length=45, length=100))


def network_pass(policy, fragments, max_seq_len, **more):
    batch, _, _ = assemble(fragments, version=0, max_lag=0, state_size=policy.state_size)
    return prepare(policy, batch, Recipe(gamma=0.9, lam=0.8, max_seq_len=max_seq_len, device=CPU, **more))


def test_chunks_of_a_real_network_give_what_whole_episodes_give(lstm):
    whole = network_pass(lstm.policy, lstm.fragments, 1000)
    chunked = network_pass(lstm.policy, lstm.fragments, 32)
    assert len(chunked.chunks) > len(whole.chunks)
    assert torch.allclose(whole.prox_dist, chunked.prox_dist, atol=1e-6)
    assert torch.allclose(whole.targets, chunked.targets, atol=1e-5)


def test_the_stored_state_matters_and_the_learner_reaches_the_state_of_the_actor(lstm):
    result = network_pass(lstm.policy, lstm.fragments, 8)
    later = [f for f in lstm.fragments if f.t0 > 0]
    assert later
    assert np.abs(result.prox_logp.numpy() - result.logp.numpy()).max() < 1e-5
    for f in later:
        f.state_in = None
    forgotten = network_pass(lstm.policy, lstm.fragments, 8)
    assert np.abs(forgotten.prox_logp.numpy() - result.logp.numpy()).max() > 1e-4


def test_one_fragments_data_change_nothing_in_another(lstm):
    before = network_pass(lstm.policy, lstm.fragments, 8)
    first = len(lstm.fragments[0])
    lstm.fragments[0].obs[""] += 3.0
    lstm.fragments[0].rewards += 5.0
    after = network_pass(lstm.policy, lstm.fragments, 8)
    for name in ("prox_dist", "values", "advantages", "targets"):
        a, b = getattr(before, name), getattr(after, name)
        assert not torch.equal(a[:first], b[:first])
        assert torch.allclose(a[first:], b[first:], atol=1e-6), name


# ---------------------------------------------------------------------------------- bad numbers


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda f: f.rewards.__setitem__(1, np.inf), "reward of row 1 is inf"),
        (lambda f: f.obs[""].__setitem__(1, np.nan), "observation of row 1"),
        (lambda f: f.logp.__setitem__(2, np.nan), "log-probability of the behaviour policy of row 2 is nan"),
        (lambda f: f.final_obs[""].fill(np.nan), "observation after the last row"),
    ],
)
def test_a_fragment_with_a_bad_number_is_found_and_its_cause_named(spoil, name):
    good, bad = (fragment([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], 4.0) for _ in range(2))
    clean = prepared([good]).targets
    spoil(bad)
    result = prepared([good, bad])
    assert result.finite.tolist() == [True, False]
    assert first_non_finite(result, 1).startswith(name)
    assert torch.equal(result.targets[:3], clean)
