"""Statistics that move with each batch: running returns, which scale rewards, and observations."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tetherl.algorithms import ppo_update
from tetherl.algorithms.parallel import ThreadRendezvous
from tetherl.algorithms.scaling import RewardScaling
from tetherl.data.assembler import EpisodeAssembler
from tetherl.data.batch import assemble
from tetherl.data.fragment import Fragment, StepCounts
from tetherl.errors import CheckpointError

GOLDEN = Path(__file__).parent.parent / "data" / "golden.json"


def played(rewards: list[float], *, gamma: float, length: int, over: bool, episode: str = "e") -> list[Fragment]:
    """The fragments of an episode with these rewards."""
    fragments: list[Fragment] = []
    assembler = EpisodeAssembler(
        StepCounts(), fragments.append, episode_id=episode, worker=0, fragment_length=length, gamma=gamma
    )
    obs = {"": np.zeros(3, np.float32)}
    for t, reward in enumerate(rewards):
        assembler.decided(obs, np.array([0]), -1.1, np.zeros(3, np.float32), 0)
        if over and t == len(rewards) - 1:
            assembler.end(reward, terminated=True, truncated=False, final_obs=None)
        else:
            assembler.result(reward, obs)
    assembler.cut()
    return fragments


def scale_of(fragments: list[Fragment], gamma: float, scaling: RewardScaling | None = None) -> float:
    batch, kept, _ = assemble(fragments, version=0, max_lag=1)
    return (scaling or RewardScaling(gamma)).take(batch, kept)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_golden_stats_02_return_scaling_from_fragments(length):
    case = next(c for c in json.loads(GOLDEN.read_text())["cases"] if c["name"] == "stats_02_return_scaling")
    given, expected = case["inputs"], case["expected"]
    end = given["done"].index(True) + 1
    gamma = given["gamma"]
    first = played(given["rewards"][:end], gamma=gamma, length=length, over=True, episode="a")
    second = played(given["rewards"][end:], gamma=gamma, length=length, over=False, episode="b")
    # In any order, in one batch or in several.
    scale = scale_of([*second, *first], gamma)
    scaled = (np.array(given["rewards"]) * scale).clip(-given["clip"], given["clip"])
    np.testing.assert_allclose(scaled, expected["scaled_with_final_stats"], rtol=1e-9)
    assert scale == pytest.approx((expected["var_population"] + given["eps"]) ** -0.5, rel=1e-9)
    scaling = RewardScaling(gamma)
    for fragment in [*first, *second]:
        several = scale_of([fragment], gamma, scaling)
    assert several == pytest.approx(scale, rel=1e-12)


def test_each_fragment_carries_what_came_before_it():
    fragments = played([1.0, 2.0, 4.0, 8.0], gamma=0.5, length=2, over=True)
    assert [f.return_before for f in fragments] == [0.0, 2.5]


def test_a_broken_reward_does_not_reach_the_statistics():
    good = played([1.0, 2.0, 5.0], gamma=0.9, length=8, over=True, episode="good")
    bad = played([1.0, float("nan"), 5.0], gamma=0.9, length=8, over=True, episode="bad")
    assert scale_of([*good, *bad], 0.9) == scale_of(good, 0.9)


def scaled_batches(kit, policy, factor: float, count: int = 3) -> list[list[Fragment]]:
    """The same play with rewards times a factor."""
    batches = []
    for seed in range(count):
        fragments = kit.fragments(policy, seed=seed)
        for f in fragments:
            f.rewards = (f.rewards * factor).astype(np.float32)
            f.prev_reward *= factor
            f.return_before = 0.0
        batches.append(fragments)
    return batches


def test_the_unit_of_rewards_does_not_matter_with_scaling(kit):
    def learn(factor: float, **config) -> tuple[dict[str, np.ndarray], float]:
        policy = kit.policy()
        learner = kit.learner(policy, **config)
        for fragments in scaled_batches(kit, policy, factor):
            result = learner.update(fragments, version=0, steps_trained=0)
        return policy.weights(), result.metrics["learner/reward_scale"]

    (a, scale), (b, thousandth) = learn(1.0, reward_scaling=True), learn(1024.0, reward_scaling=True)
    assert thousandth == pytest.approx(scale / 1024, rel=1e-6)
    assert all(np.allclose(a[k], b[k], atol=1e-4) for k in a)
    raw, unchanged = learn(1024.0)
    assert unchanged == 1.0
    assert not np.allclose(a["value_head.weight"], raw["value_head.weight"], atol=1e-2)


def test_one_scale_holds_for_a_whole_update_also_when_advantages_are_computed_again(kit, monkeypatch):
    seen = []
    refresh = ppo_update.refresh

    def watched(policy, prepared, recipe, **what):
        seen.append((recipe.reward_scale, recipe.reward_clip))
        return refresh(policy, prepared, recipe, **what)

    monkeypatch.setattr(ppo_update, "refresh", watched)
    policy = kit.policy()
    learner = kit.learner(policy, reward_scaling=True, recompute_advantages="per_epoch")
    scales = [
        learner.update(fragments, version=0, steps_trained=0).metrics["learner/reward_scale"]
        for fragments in scaled_batches(kit, policy, 3.0, count=2)
    ]
    assert scales[0] != scales[1] and set(seen) == {(scale, 10.0) for scale in scales}


def test_statistics_of_returns_are_saved_and_restored(kit):
    def learner():
        return kit.learner(kit.policy(), reward_scaling=True)

    one = learner()
    batches = scaled_batches(kit, one.policy, 5.0)
    for fragments in batches[:2]:
        one.update(fragments, version=0, steps_trained=0)
    arrays, meta = one.state()
    other = learner()
    other.load_state(arrays, json.loads(json.dumps(meta)))
    results = [x.update(batches[2], version=0, steps_trained=0).metrics for x in (one, other)]
    assert results[0] == results[1]
    assert all(np.array_equal(v, other.policy.weights()[k]) for k, v in one.policy.weights().items())
    del meta["return_moments"]
    with pytest.raises(CheckpointError, match=r"return_moments is missing.*reward_scaling"):
        learner().load_state(arrays, meta)


# ---- observations


def normalizing(kit, **model):
    return kit.policy(normalize_observations=True, **model)


@pytest.mark.parametrize(
    "model", [{}, {"rnn": "lstm"}, {"rnn": "gru", "vf_share_layers": False, "lstm_use_prev_reward": True}]
)
def test_ratios_are_one_in_every_version_while_statistics_move(kit, model):
    """The actor has its own copy and takes over weights and statistics between the updates only."""
    policy, actor = normalizing(kit, **model), normalizing(kit, **model)
    learner = kit.learner(policy)
    sampler = kit.Sampler(actor, lambda: kit.NoiseEnv(3, 20), 4, seed=0)
    means = []
    for version in range(4):
        actor.load_weights(policy.weights())
        fragments, _ = sampler.collect(256, version=version, fragment_length=30)
        result = learner.update(fragments, version=version, steps_trained=0)
        assert result.metrics["learner/ratio_max_first"] <= 1e-4
        means.append(policy.normalizer.mean_0.tolist())
    assert len({tuple(m) for m in means}) == 4
    assert float(policy.normalizer.count) >= 4 * 256
    # The check is able to fail: with statistics that moved on their own it does.
    actor.load_weights(policy.weights())
    fragments, _ = sampler.collect(256, version=4, fragment_length=30)
    policy.normalizer.mean_0.add_(1.0)
    assert learner.update(fragments, version=4, steps_trained=0).metrics["learner/ratio_max_first"] > 1e-4


def test_statistics_are_of_all_rows_of_finite_fragments_in_the_batch(kit):
    policy = normalizing(kit)
    learner = kit.learner(policy)
    fragments = kit.fragments(policy, steps=200, envs=5)
    context, stale, broken, *rest = fragments
    context.by_policy[: len(context) // 2] = False
    stale.versions[:] = -9
    broken.rewards[0] = np.nan
    result = learner.update(fragments, version=0, steps_trained=0)
    assert result.dropped.keys() == {"not_policy", "stale", "quarantined"}
    seen = np.concatenate([f.obs[""] for f in (context, *rest)]).astype(np.float64)
    assert float(policy.normalizer.count) == len(seen)
    np.testing.assert_allclose(policy.normalizer.mean_0, seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose(policy.normalizer.variance_0, seen.var(0), rtol=1e-10)


def test_nothing_to_train_on_moves_nothing(kit):
    policy = normalizing(kit)
    fragments = kit.fragments(policy)
    for f in fragments:
        f.versions[:] = -9
    kit.learner(policy).update(fragments, version=0, steps_trained=0)
    assert float(policy.normalizer.count) == 0


def test_the_order_of_fragments_does_not_matter_to_the_statistics(kit):
    found = []
    for order in (1, -1):
        policy = normalizing(kit)
        kit.learner(policy).update(kit.fragments(policy)[::order], version=0, steps_trained=0)
        found.append(policy.normalizer)
    torch.testing.assert_close(found[0].mean_0, found[1].mean_0, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found[0].variance_0, found[1].variance_0, rtol=1e-12, atol=0)


def test_a_checkpoint_holds_the_statistics(kit):
    policy = normalizing(kit)
    learner = kit.learner(policy)
    learner.update(kit.fragments(policy), version=0, steps_trained=0)
    arrays, meta = learner.state()
    other = normalizing(kit)
    kit.learner(other).load_state(arrays, meta)
    assert float(other.normalizer.count) == float(policy.normalizer.count) > 0
    assert torch.equal(other.normalizer.mean_0, policy.normalizer.mean_0)


def test_several_learners_keep_the_same_statistics_as_one(kit):
    def learn(size: int) -> list[tuple[dict[str, np.ndarray], dict]]:
        meeting = ThreadRendezvous(size)

        def one(rank: int) -> tuple[dict[str, np.ndarray], dict]:
            torch.set_num_threads(1)
            policy = normalizing(kit)
            reduction = meeting.join(rank) if size > 1 else None
            learner = kit.learner(policy, reduction=reduction, reward_scaling=True)
            for seed in range(2):
                learner.update(kit.fragments(kit.policy(), seed=seed), version=0, steps_trained=0)
            return learner.state()

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))

    (alone, meta), *_ = learn(1)
    for arrays, others_meta in learn(3):
        assert others_meta["return_moments"] == meta["return_moments"]
        for name, values in alone.items():
            if name.startswith("policy/normalizer."):
                assert np.array_equal(arrays[name], values), name
            elif name.startswith("policy/"):
                np.testing.assert_allclose(arrays[name], values, atol=1e-4)
