"""Environments whose answer is known exactly: the first thing to look at when learning goes wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

ONE_BOX = spaces.Box(-1.0, 1.0, (1,), np.float32)


def vector(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


class Env:
    """Base: `play(action) -> reward`, `look() -> observation`, `length` steps, then termination."""

    observations, actions, length = ONE_BOX, spaces.Discrete(2), 1

    def reset(self, rng):
        self.rng, self.t = rng, 0
        self.begin()
        return self.look()

    def begin(self):
        pass

    def look(self):
        return vector(0.0)

    def step(self, action):
        reward = self.play(action)
        self.t += 1
        return self.look(), reward, self.t == self.length, False


class Train:
    """Trains on copies of an environment; the learning rate falls to 0."""

    def __init__(self, kit, env, *, steps, envs=8, batch=256, fragment_length=128, model=None, **settings):
        settings = {"lr": [(0, 5e-3), (steps, 0.0)], "minibatch_size": 64, "epochs": 8} | settings
        self.policy = kit.policy(env.observations, env.actions, **(model or {}))
        learner = kit.learner(self.policy, max_seq_len=16, **settings)
        self.sampler = kit.Sampler(self.policy, env, envs, seed=0)
        self.metrics, self.returns = [], []
        trained = 0
        while trained < steps:
            version = len(self.metrics)
            fragments, returns = self.sampler.collect(batch, version=version, fragment_length=fragment_length)
            result = learner.update(fragments, version=version, steps_trained=trained)
            assert result.metrics["learner/ratio_max_first"] <= 1e-4
            trained += result.trained
            self.metrics.append(result.metrics)
            self.returns.append(float(np.mean(returns)) if returns else math.nan)
        test = kit.Sampler(self.policy, env, 8, seed=9)
        self.greedy = float(np.mean(test.collect(800, version=0, explore=False)[1]))

    def outputs(self, observations):
        """Distribution inputs and values (reward units) at first steps of episodes."""
        policy, n = self.policy, len(observations)
        rows = policy.codec.stack([policy.codec.encode(o) for o in observations])
        obs = {leaf: torch.from_numpy(array) for leaf, array in rows.items()}
        no_action = torch.zeros(n, policy.actions.width, dtype=policy.dist.action_dtype)
        with torch.no_grad():
            out = policy(obs, no_action, torch.zeros(n), torch.zeros(n, dtype=torch.bool), [1] * n, None)
        return out.dist, policy.denormalize(out.values).numpy()

    def values(self, *observations) -> np.ndarray:
        return self.outputs(observations)[1]


class P1(Env):
    def play(self, action):
        return 1.0


class P2(Env):
    def begin(self):
        self.sign = self.rng.choice([-1.0, 1.0])

    def look(self):
        return vector(self.sign)

    def play(self, action):
        return self.sign


class P3(Env):
    length = 2

    def look(self):
        return vector(float(self.t > 0))

    def play(self, action):
        return float(self.t == 1)


class P4(Env):
    def play(self, action):
        return 1.0 if action == 1 else -1.0


class P5(P2):
    def play(self, action):
        return 1.0 if action == (self.sign > 0) else 0.0


class P6(Env):
    """Never terminates; truncated every 10 steps."""

    def step(self, action):
        self.t += 1
        return self.look(), 1.0, False, self.t == 10


class P7(Env):
    """Reward 1 in state 10, reached after 10 steps; half of the episodes are truncated right there."""

    observations = spaces.Discrete(11)

    def begin(self):
        self.length = self.rng.choice([10, 20])

    def look(self):
        return min(self.t, 10)

    def step(self, action):
        reward = float(self.t >= 10)
        self.t += 1
        return self.look(), reward, False, self.t == self.length


class P8(Env):
    """A cue, eight empty steps, a choice: right if it is that of the cue."""

    observations, length = spaces.Box(-1.0, 1.0, (2,), np.float32), 10

    def begin(self):
        self.cue = self.rng.integers(2)

    def look(self):
        return vector(2.0 * self.cue - 1 if self.t == 0 else 0.0, float(self.t == 9))

    def play(self, action):
        return 0.0 if self.t < 9 else (1.0 if action == self.cue else -1.0)


class P9(Env):
    length = 11

    def begin(self):
        self.last = None

    def play(self, action):
        reward = float(self.last is not None and action != self.last)
        self.last = action
        return reward


class P12(Env):
    observations = actions = spaces.MultiDiscrete([3, 4])

    def begin(self):
        self.target = self.rng.integers([3, 4])

    def look(self):
        return self.target

    def play(self, action):
        return float(np.array_equal(action, self.target))


class P14(Env):
    """Hit a number in [300, 500]; the observation tells it on the scale [-1, 1]."""

    actions = spaces.Box(300.0, 500.0, (1,), np.float32)

    def begin(self):
        self.target = self.rng.uniform(-1, 1)

    def look(self):
        return vector(self.target)

    def play(self, action):
        assert 300 <= action[0] <= 500
        return -(((float(action[0]) - 400) / 100 - self.target) ** 2)


@pytest.mark.parametrize("normalize", [False, True])
def test_p1_the_value_of_a_certain_reward(kit, normalize):
    run = Train(kit, P1, steps=3000, normalize_values=normalize)
    assert run.values(vector(0)) == pytest.approx([1.0], abs=0.02)


def test_p2_values_follow_the_observation(kit):
    run = Train(kit, P2, steps=3000)
    assert run.values(vector(-1), vector(1)) == pytest.approx([-1.0, 1.0], abs=0.03)


@pytest.mark.parametrize("fragment_length", [1, 2])
@pytest.mark.parametrize("lam", [0.0, 0.95])
def test_p3_a_reward_at_the_end_is_discounted(kit, fragment_length, lam):
    run = Train(kit, P3, steps=4000, gamma=0.5, lambda_=lam, fragment_length=fragment_length)
    assert run.values(vector(0), vector(1)) == pytest.approx([0.5, 1.0], abs=0.03)


def test_p4_the_better_action_wins(kit):
    run = Train(kit, P4, steps=4000)
    logits, values = run.outputs([vector(0)])
    assert torch.softmax(logits, -1)[0, 1] > 0.98
    assert values == pytest.approx([1.0], abs=0.1)


def test_p5_the_observation_tells_the_action(kit):
    run = Train(kit, P5, steps=4000)
    assert run.greedy == 1.0 and run.returns[-1] > 0.95
    assert run.values(vector(-1), vector(1)) == pytest.approx([1.0, 1.0], abs=0.1)


def test_p6_a_time_limit_is_not_an_end(kit):
    run = Train(kit, P6, steps=8000, gamma=0.9, lambda_=1.0, normalize_values=True)
    assert run.values(vector(0)) == pytest.approx([10.0], abs=0.3)


def test_p6_taken_for_an_end_gives_the_known_wrong_value(kit, monkeypatch):
    step = P6.step

    def wrong(self, action):
        obs, reward, _, truncated = step(self, action)
        return obs, reward, truncated, False

    monkeypatch.setattr(P6, "step", wrong)
    run = Train(kit, P6, steps=8000, gamma=0.9, lambda_=1.0, normalize_values=True)
    assert run.values(vector(0)) == pytest.approx([4.138], abs=0.3)


def test_p7_the_bootstrap_looks_at_the_final_observation(kit):
    run = Train(kit, P7, steps=12_000, gamma=0.9, normalize_values=True, vf_loss_coeff=1.0)
    assert run.values(0, 5, 9, 10) == pytest.approx([3.4868, 5.9049, 9.0, 10.0], rel=0.03)


def test_p8_memory_solves_what_no_memory_can(kit):
    settings = {"batch": 1024, "envs": 16, "minibatch_size": 256, "epochs": 4, "fragment_length": 64}
    settings["lr"] = [(0, 3e-3), (30_000, 0.0)]
    run = Train(kit, P8, steps=30_000, model={"use_lstm": True, "lstm_cell_size": 32}, **settings)
    assert run.greedy >= 0.95
    assert abs(Train(kit, P8, steps=10_000, **settings).greedy) < 0.5


def test_p9_the_previous_action_is_an_input(kit):
    run = Train(kit, P9, steps=15_000, batch=512, model={"lstm_use_prev_action": True})
    assert run.greedy == 10 and run.returns[-1] > 9
    without = Train(kit, P9, steps=5000)
    assert without.greedy <= 5 and without.returns[-1] < 7


def test_p12_two_parts_of_an_action_are_learned_together(kit):
    run = Train(kit, P12, steps=12_000, batch=512, entropy_coeff=0.01)
    # The policy is nearly uniform at the start, its entropy therefore log 12.
    assert run.metrics[0]["learner/entropy"] == pytest.approx(math.log(12), abs=0.05)
    assert run.greedy == 1.0 and run.returns[-1] > 0.9


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.01])
def test_p14_bounded_actions_are_scaled(kit, entropy_coeff):
    run = Train(kit, P14, steps=10_000, batch=512, entropy_coeff=entropy_coeff)
    assert run.greedy > -0.05
