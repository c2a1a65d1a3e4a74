"""Policies and inputs for the tests of the network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.models.config import ModelConfig
from tetherl.models.policy import Policy

FOUNDING = [
    [16, [5, 5], 3],
    [32, [5, 5], 3],
    [64, [5, 5], 3],
    [128, [3, 3], 2],
    [256, [3, 3], 2],
    [512, [3, 3], 2],
]

VECTOR = spaces.Box(-1, 1, (5,))
IMAGE = spaces.Box(0, 255, (20, 16, 3), np.uint8)
ACTIONS: dict[str, spaces.Space] = {
    "discrete": spaces.Discrete(4),
    "multidiscrete": spaces.MultiDiscrete([2, 3, 4]),
    "one part": spaces.MultiDiscrete([9]),
    "nine keys": spaces.MultiDiscrete([2] * 9),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(np.array([-1, 300], np.float32), np.array([np.inf, 500], np.float32)),
    "parts": spaces.Dict(
        {
            "a": spaces.Box(-1, 1, (2,)),
            "b": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 9, ()), spaces.MultiBinary(2)]),
        }
    ),
}


class Rows(NamedTuple):
    """N rows of input, as arrays."""

    obs: dict[str, np.ndarray]
    prev_action: np.ndarray
    prev_reward: np.ndarray
    has_prev: np.ndarray

    def at(self, index: Any) -> Rows:
        return Rows({k: v[index] for k, v in self.obs.items()}, *(a[index] for a in self[1:]))

    def join(self, other: Rows) -> Rows:
        obs = {k: np.concatenate([v, other.obs[k]]) for k, v in self.obs.items()}
        return Rows(obs, *(np.concatenate([a, b]) for a, b in zip(self[1:], other[1:], strict=True)))

    def tensors(self) -> tuple[Any, ...]:
        return (
            {k: torch.from_numpy(v) for k, v in self.obs.items()},
            *(torch.from_numpy(a) for a in self[1:]),
        )


def policy(obs: spaces.Space = VECTOR, actions: spaces.Space = ACTIONS["discrete"], seed: int = 0, **model) -> Policy:
    return Policy(obs, actions, ModelConfig(**model), seed=seed)


def lively(net: Policy, seed: int = 1) -> Policy:
    """Larger head and biases, so that differences in the features are seen in the outputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        net.policy_head.weight.mul_(100)
        for name, parameter in net.named_parameters():
            if "bias" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return net


def rows(net: Policy, count: int, seed: int = 0, *, first: bool = True) -> Rows:
    """Random rows of one episode; `first`: the first row begins it."""
    rng = np.random.default_rng(seed)
    obs = net.codec.stack([_draw(net.codec, rng) for _ in range(count)])
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, net.dist.inputs_size, generator=generator)
    actions = net.dist.sample(inputs, generator).numpy()
    has_prev = np.ones(count, bool)
    has_prev[0] = not first
    return Rows(obs, actions, rng.normal(0, 5, count).astype(np.float32), has_prev)


def _draw(codec: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    space = codec.space
    space.seed(int(rng.integers(2**31)))
    return codec.encode(space.sample())


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers above; test files cannot import each other."""
    return SimpleNamespace(
        policy=policy,
        lively=lively,
        rows=rows,
        ACTIONS=ACTIONS,
        VECTOR=VECTOR,
        IMAGE=IMAGE,
        FOUNDING=FOUNDING,
    )


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
