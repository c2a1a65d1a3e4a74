"""Masks, actions of several parts, and squashed actions, from environment to learner: what was allowed when acting is
allowed when learning, and the ratios of the first step are 1."""

from __future__ import annotations

import math

import gymnasium
import msgspec
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.algorithms.config import AlgorithmConfig
from tetherl.algorithms.ppo import PPOLearner
from tetherl.errors import SpaceError
from tetherl.models.config import ModelConfig
from tetherl.models.policy import Policy
from tetherl.workers.evaluator import Evaluator
from tetherl.workers.rollout import RolloutWorker
from tetherl.workers.spec import WorkerSpec

CONFIG = AlgorithmConfig(
    train_batch_size=256,
    minibatch_size=64,
    epochs=4,
    lr=1e-2,
    max_lag=1,
    entropy_coeff=0.01,
    use_kl_loss=True,
    normalize_values=False,
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class MaskedEnv(gymnasium.Env):
    """Allows some choices at each step and raises at every other; the observation shows which. Rewards are noise."""

    def __init__(self, action_space: spaces.Space, *, hide: bool = False, length: int = 7) -> None:
        self.action_space = action_space
        nvec = getattr(action_space, "nvec", None)
        bits = isinstance(action_space, spaces.MultiBinary)
        self.sizes = [action_space.n] if nvec is None and not bits else list(nvec) if not bits else [1] * action_space.n
        self.observation_space = spaces.MultiBinary(int(sum(self.sizes)))
        self.hide, self.length, self.episode = hide, length, 0

    def _look(self):
        self.allowed = [self.np_random.random(n) < 0.4 for n in self.sizes]
        if not isinstance(self.action_space, spaces.MultiBinary):
            for part in self.allowed:
                part[self.np_random.integers(len(part))] = True
        mask = np.concatenate(self.allowed)
        info = {} if self.hide else {"action_mask": mask.astype(np.int8)}
        return mask.astype(np.int8), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.episode += 1
        return self._look()

    def step(self, action):
        assert self.action_space.contains(action)
        chosen = np.atleast_1d(action)
        if isinstance(self.action_space, spaces.MultiBinary):
            wrong = [c == 1 and not part[0] for c, part in zip(chosen, self.allowed, strict=True)]
        else:
            wrong = [not part[c] for c, part in zip(chosen, self.allowed, strict=True)]
        if any(wrong):
            raise RuntimeError(f"{action} is not allowed now")
        self.t += 1
        over = self.t == self.length
        obs, info = self._look()
        return obs, float(self.np_random.normal()), over and self.episode % 2 == 0, over and self.episode % 2 == 1, info


MASKED = {
    "discrete": spaces.Discrete(10),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multibinary": spaces.MultiBinary(4),
}
RECURRENT = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8]}


def worker_and_learner(make_env, *, envs=4, model=None, config=None, **env_config):
    settings = ModelConfig(**({"fcnet_hiddens": [32]} if model is None else model))
    spec = WorkerSpec(
        index=1, seed=3, model=settings, env=make_env, env_config=env_config, envs=envs, fragment_length=32
    )
    worker = RolloutWorker(spec)
    env = make_env(**env_config)
    policy = Policy(env.observation_space, env.action_space, settings, seed=5)
    learner = PPOLearner(policy, msgspec.structs.replace(CONFIG, **(config or {})), max_seq_len=4, seed=0)
    worker.set_weights(policy.weights(), 0)
    return worker, learner, spec


def train(worker, learner, steps, iterations):
    """Metrics and mean returns of the iterations."""
    results = []
    for version in range(iterations):
        sample = worker.sample(steps)
        result = learner.update(sample.fragments, version=version, steps_trained=0)
        assert result.trained == sum(len(f) for f in sample.fragments)
        assert result.metrics["learner/ratio_max_first"] <= 1e-4
        assert all(math.isfinite(v) for v in result.metrics.values())
        worker.set_weights(learner.policy.weights(), version + 1)
        results.append(np.mean([e.episode_return for e in sample.episodes]) if sample.episodes else math.nan)
    return results


@pytest.mark.parametrize("model", [None, RECURRENT], ids=["plain", "recurrent"])
@pytest.mark.parametrize("kind", MASKED)
def test_no_forbidden_choice_is_made_and_the_first_ratios_are_one(kind, model):
    worker, learner, spec = worker_and_learner(MaskedEnv, model=model, action_space=MASKED[kind])
    sample = worker.sample(64)
    choices = learner.policy.dist.inputs_size
    for fragment in sample.fragments:
        assert fragment.mask is not None and fragment.mask.shape == (len(fragment), choices)
        np.testing.assert_array_equal(fragment.mask, fragment.obs[""].astype(bool))  # the mask of its own row
    train(worker, learner, 64, 3)
    evaluator = Evaluator(spec)
    evaluator.set_weights(learner.policy.weights(), 3)
    for explore in (False, True):
        assert evaluator.evaluate(6, explore).lengths == [7] * 6
    worker.close()


def test_a_learner_that_forgets_the_masks_is_found_out():
    worker, learner, _ = worker_and_learner(MaskedEnv, action_space=MASKED["discrete"])
    fragments = worker.sample(64).fragments
    for fragment in fragments:
        fragment.mask = None
    assert learner.update(fragments, version=0, steps_trained=0).metrics["learner/ratio_max_first"] > 0.1
    worker.close()


@pytest.mark.parametrize("kind", MASKED)
def test_with_one_choice_left_there_is_no_entropy_no_divergence_and_no_policy_gradient(kind):
    class OneChoice(MaskedEnv):
        def _look(self):
            super()._look()
            bits = isinstance(self.action_space, spaces.MultiBinary)
            self.allowed = [np.arange(n) == (n if bits else self.np_random.integers(n)) for n in self.sizes]
            mask = np.concatenate(self.allowed).astype(np.int8)
            return mask, {"action_mask": mask}

    worker, learner, _ = worker_and_learner(OneChoice, action_space=MASKED[kind])
    before = learner.policy.policy_head.weight.detach().clone()
    metrics = learner.update(worker.sample(64).fragments, version=0, steps_trained=0).metrics
    for key in ("entropy", "kl", "kl_behaviour", "ratio_max_first"):
        assert metrics[f"learner/{key}"] == 0, key
    assert torch.equal(learner.policy.policy_head.weight, before)
    worker.close()


def test_without_a_mask_the_environment_complains():
    worker, _, _ = worker_and_learner(MaskedEnv, action_space=MASKED["discrete"], hide=True)
    with pytest.raises(RuntimeError, match="not allowed"):
        worker.sample(64)
    worker.close()


def test_a_mask_in_the_middle_of_a_run_of_none():
    """Rows with and without masks mix, within a fragment and between fragments."""

    class Sometimes(MaskedEnv):
        def _look(self):
            obs, info = super()._look()
            self.allowed = [np.ones(n, bool) for n in self.sizes] if self.np_random.random() < 0.5 else self.allowed
            everything = all(part.all() for part in self.allowed)
            return obs, {} if everything else info

    worker, learner, _ = worker_and_learner(Sometimes, action_space=MASKED["multidiscrete"], length=3)
    fragments = worker.sample(64).fragments
    assert any(f.mask is None for f in fragments)
    rows = np.concatenate([f.mask for f in fragments if f.mask is not None])
    assert rows.all(1).any() and not rows.all(1).all()
    train(worker, learner, 32, 2)
    worker.close()


class Forbidding(MaskedEnv):
    def _look(self):
        obs, info = super()._look()
        if self.t == 3:
            info["action_mask"] = np.zeros_like(info["action_mask"])
        return obs, info

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return super().reset(seed=seed)


def test_a_mask_that_forbids_everything_names_the_episode():
    worker, _, spec = worker_and_learner(Forbidding, envs=2, action_space=MASKED["discrete"])
    with pytest.raises(SpaceError, match=r"rollout worker 1.*episode 1-\d.*forbids every choice"):
        worker.sample(16)
    worker.close()
    with pytest.raises(SpaceError, match=r"episode \d of the evaluation.*forbids every choice"):
        Evaluator(spec).evaluate(1)


class P11(gymnasium.Env):
    """Ten actions, of which only those that the observation names are valid; the others raise. The lowest valid one is
    right."""

    observation_space, action_space = spaces.MultiBinary(10), spaces.Discrete(10)

    def _look(self):
        self.valid = self.np_random.random(10) < 0.4
        self.valid[self.np_random.integers(10)] = True
        return self.valid.astype(np.int8), {"action_mask": self.valid.astype(np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._look()

    def step(self, action):
        if not self.valid[action]:
            raise RuntimeError(f"action {action} is not valid")
        reward = 1.0 + (action == np.argmax(self.valid))
        return self._look()[0], reward, True, False, {}


def test_p11_only_valid_actions_and_the_right_one_of_them():
    worker, learner, spec = worker_and_learner(P11, envs=8, config={"use_kl_loss": False})
    returns = train(worker, learner, 64, 12)
    assert returns[0] >= 1  # never an invalid action, from the first step on
    evaluator = Evaluator(spec)
    evaluator.set_weights(learner.policy.weights(), 1)
    assert np.mean(evaluator.evaluate(100).returns) > 1.8
    worker.close()


# ---- actions of several parts, squashed actions


class AimEnv(gymnasium.Env):
    """One step: press the key that the observation names, and hit the point that it shows."""

    observation_space = spaces.Dict({"key": spaces.Discrete(3), "point": spaces.Box(-1, 1, (1,), np.float32)})

    def __init__(self, action_space: spaces.Space) -> None:
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.key, self.point = int(self.np_random.integers(3)), self.np_random.uniform(-0.9, 0.9)
        return {"key": self.key, "point": np.array([self.point], np.float32)}, {}

    def parts(self, action):
        return action["key"], action["aim"]

    def step(self, action):
        assert self.action_space.contains(action)
        key, aim = self.parts(action)
        reward = float(key == self.key) - ((float(aim[0]) - 400) / 100 - self.point) ** 2
        return self.reset()[0], reward, True, False, {}


class AimTupleEnv(AimEnv):
    def parts(self, action):
        return action[1][0], action[0]


AIM = spaces.Box(300.0, 500.0, (1,), np.float32)
PARTS = {
    "dict": (AimEnv, spaces.Dict({"key": spaces.Discrete(3), "aim": AIM})),
    "tuple": (AimTupleEnv, spaces.Tuple([AIM, spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)])])),
}


@pytest.mark.parametrize(("kind", "distribution"), [("dict", "gaussian"), ("tuple", "tanh")])
def test_the_parts_of_an_action_are_learned_together(kind, distribution):
    make_env, space = PARTS[kind]
    model = {"fcnet_hiddens": [32], "action_distribution": distribution}
    worker, learner, spec = worker_and_learner(make_env, envs=8, model=model, action_space=space)
    assert worker.sample(1).fragments[0].actions.dtype == np.float32
    train(worker, learner, 64, 25)
    evaluator = Evaluator(spec)
    evaluator.set_weights(learner.policy.weights(), 1)
    assert np.mean(evaluator.evaluate(100).returns) > 0.85
    worker.close()


@pytest.mark.parametrize("distribution", ["gaussian", "tanh"])
@pytest.mark.parametrize("kind", ["dict", "tuple", "box"])
def test_first_ratios_with_memory_and_previous_actions_of_parts(kind, distribution):
    make_env, space = PARTS.get(kind, (AimEnv, AIM))
    model = {**RECURRENT, "lstm_use_prev_reward": True, "action_distribution": distribution}

    class Long(make_env):
        def step(self, action):
            if kind == "box":
                action = {"key": 0, "aim": action}
                self.action_space, own = PARTS["dict"][1], self.action_space
            obs, reward, _, _, _ = super().step(action)
            if kind == "box":
                self.action_space = own
            self.t = getattr(self, "t", 0) + 1
            return obs, reward, self.t % 11 == 0, self.t % 7 == 0, {}

    worker, learner, _ = worker_and_learner(Long, model=model, action_space=space)
    train(worker, learner, 64, 3)
    worker.close()
