from __future__ import annotations

import gymnasium
import numpy as np
import pytest

LENGTH = 60_000


class CartPole:
    def __init__(self):
        self.env = gymnasium.make("CartPole-v1")
        self.observations, self.actions = self.env.observation_space, self.env.action_space

    def reset(self, rng):
        return self.env.reset(seed=int(rng.integers(2**31)))[0]

    def step(self, action):
        return self.env.step(action)[:4]


def learn(kit, seed: int, *, lag: int = 0, **settings) -> float:
    """-> mean return of the last 100 episodes. With a lag, fragments wait that many updates for their turn."""
    env = CartPole()
    policy = kit.policy(env.observations, env.actions, seed=seed, fcnet_hiddens=[64, 64])
    settings = {"minibatch_size": 128, "epochs": 4, "gamma": 0.98, "lr": 1e-3, "max_lag": lag} | settings
    learner = kit.learner(policy, seed=seed, **settings)
    sampler = kit.Sampler(policy, CartPole, 8, seed)
    waiting, returns, version = [], [], 0
    for _ in range(LENGTH // 512):
        fragments, ended = sampler.collect(512, version=version, fragment_length=64)
        returns += ended
        waiting.append(fragments)
        if len(waiting) > lag:
            result = learner.update(waiting.pop(0), version=version, steps_trained=512 * version)
            assert result.trained == 512
            version += 1
    return float(np.mean(returns[-100:]))


@pytest.mark.slow
def test_cartpole_is_learned(kit):
    scores = [learn(kit, seed) for seed in range(3)]
    assert sorted(scores)[1] > 300, scores


@pytest.mark.slow
def test_cartpole_is_learned_from_old_experience_with_the_lag_scaled_clip(kit):
    scores = [learn(kit, seed, lag=16, clip_max=0.8) for seed in range(3)]
    assert sorted(scores)[1] > 350, scores
