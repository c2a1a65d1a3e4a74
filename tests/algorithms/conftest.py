"""A sampler small enough to be read at a glance, and builders for policies, learners and fragments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.algorithms.config import AlgorithmConfig
from tetherl.algorithms.ppo import PPOLearner
from tetherl.data.fragment import Fragment
from tetherl.models.config import ModelConfig
from tetherl.models.policy import Policy

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Slot:
    """One environment copy and its open fragment."""

    env: object
    number: int
    episode: int = -1
    t: int = 0
    total: float = 0.0
    obs: object = None
    prev_action: np.ndarray | None = None
    prev_reward: float = 0.0
    state: np.ndarray | None = None
    rows: list = field(default_factory=list)
    first: tuple | None = None  # t0, state_in, prev_action, prev_reward of the open fragment


class Sampler:
    """Plays `policy` in copies of an environment (reset(rng) -> obs, step(action) -> obs, r, term, trunc)."""

    def __init__(self, policy: Policy, make_env: Callable[[], object], envs: int, seed: int) -> None:
        self.policy = policy
        self.generator = torch.Generator().manual_seed(seed)
        self.slots = []
        for i, child in enumerate(np.random.SeedSequence(seed).spawn(envs)):
            self.slots.append((Slot(make_env(), i), np.random.default_rng(child)))
        self.started = False

    def _reset(self, slot: Slot, rng: np.random.Generator) -> None:
        slot.obs = self.policy.codec.encode(slot.env.reset(rng))
        slot.episode += 1
        slot.t, slot.total = 0, 0.0
        slot.prev_action, slot.prev_reward = None, 0.0
        slot.state = np.zeros(self.policy.state_size, np.float32)

    def collect(self, steps: int, *, version: int, fragment_length: int = 128, explore: bool = True):
        """-> (fragments with `steps` rows at least, returns of the episodes that ended)."""
        policy, fragments, returns = self.policy, [], []
        if not self.started:
            for slot, rng in self.slots:
                self._reset(slot, rng)
            self.started = True
        width, dtype = policy.actions.width, policy.actions.dtype
        done_rows = 0
        while done_rows < steps:
            prev = np.stack([np.zeros(width, dtype) if s.prev_action is None else s.prev_action for s, _ in self.slots])
            state = np.stack([s.state for s, _ in self.slots]) if policy.is_recurrent else None
            act = policy.act(
                policy.codec.stack([s.obs for s, _ in self.slots]),
                prev,
                np.array([s.prev_reward for s, _ in self.slots], np.float32),
                np.array([s.prev_action is not None for s, _ in self.slots]),
                state,
                explore=explore,
                generator=self.generator,
            )
            for i, (slot, rng) in enumerate(self.slots):
                action = act.actions[i].copy()
                obs, reward, terminated, truncated = slot.env.step(policy.actions.to_env(action))
                done_rows += 1
                if slot.first is None:
                    slot.first = (slot.t, slot.state, slot.prev_action, slot.prev_reward)
                slot.rows.append((slot.obs, action, act.logp[i], act.dist[i].copy(), reward, version))
                slot.obs = policy.codec.encode(obs)
                slot.prev_action, slot.prev_reward = action, float(reward)
                slot.state = act.state[i].copy() if policy.is_recurrent else slot.state
                slot.t += 1
                slot.total += reward
                if terminated or truncated or len(slot.rows) == fragment_length:
                    fragments.append(self._emit(slot, terminated, truncated))
                if terminated or truncated:
                    returns.append(slot.total)
                    self._reset(slot, rng)
        fragments += [self._emit(slot, False, False) for slot, _ in self.slots if slot.rows]
        return fragments, returns

    def _emit(self, slot: Slot, terminated: bool, truncated: bool) -> Fragment:
        obs, actions, logp, dist, rewards, versions = zip(*slot.rows, strict=True)
        t0, state_in, prev_action, prev_reward = slot.first
        slot.rows, slot.first = [], None
        return Fragment(
            obs=self.policy.codec.stack(obs),
            final_obs=None if terminated else slot.obs,
            actions=np.stack(actions),
            logp=np.array(logp, np.float32),
            dist=np.stack(dist),
            rewards=np.array(rewards, np.float32),
            versions=np.array(versions, np.int64),
            by_policy=np.ones(len(obs), bool),
            terminated=terminated,
            truncated=truncated,
            episode_id=f"{slot.number}/{slot.episode}",
            t0=t0,
            worker=0,
            state_in=state_in if self.policy.is_recurrent else None,
            prev_action=prev_action,
            prev_reward=prev_reward,
        )


class NoiseEnv:
    """Random observations and rewards; episodes have `length` steps; every second one terminates."""

    def __init__(self, size: int = 3, length: int = 20) -> None:
        self.size, self.length, self.episode = size, length, 0

    def reset(self, rng):
        self.rng, self.t = rng, 0
        self.episode += 1
        return self.rng.normal(size=self.size).astype(np.float32)

    def step(self, action):
        self.t += 1
        over = self.t == self.length
        obs = self.rng.normal(size=self.size).astype(np.float32)
        return obs, float(self.rng.normal()), over and self.episode % 2 == 0, over and self.episode % 2 == 1


def box(size: int = 3) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (size,), np.float32)


CONFIG = AlgorithmConfig(
    train_batch_size=256,
    minibatch_size=64,
    epochs=4,
    lr=1e-3,
    max_lag=1,
    entropy_coeff=0.0,
    use_kl_loss=False,
    normalize_values=False,
)


def make_config(**changes) -> AlgorithmConfig:
    return msgspec.structs.replace(CONFIG, **changes)


def make_policy(observations=None, actions=None, *, seed: int = 0, **model) -> Policy:
    model = {"fcnet_hiddens": [32]} | model
    return Policy(observations or box(), actions or spaces.Discrete(3), ModelConfig(**model), seed=seed)


def make_learner(policy: Policy, *, max_seq_len: int = 8, seed: int = 0, reduction=None, **changes) -> PPOLearner:
    return PPOLearner(policy, make_config(**changes), max_seq_len=max_seq_len, seed=seed, reduction=reduction)


def noise_fragments(policy: Policy, *, steps=256, envs=4, seed=0, version=0, fragment_length=128, length=20):
    size = policy.codec.leaves[0].shape[0]
    sampler = Sampler(policy, lambda: NoiseEnv(size, length), envs, seed)
    return sampler.collect(steps, version=version, fragment_length=fragment_length)[0]


def golden(name: str) -> dict:
    return json.loads((DATA / "learner_golden.json").read_text())[name]


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    return SimpleNamespace(
        Sampler=Sampler,
        NoiseEnv=NoiseEnv,
        box=box,
        config=make_config,
        policy=make_policy,
        learner=make_learner,
        fragments=noise_fragments,
        golden=golden,
    )
