"""Evaluation worker: plays whole episodes with a frozen policy. Nothing it sees is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tetherl.data.fragment import stack_masks
from tetherl.models.numerics import set_up_torch
from tetherl.models.policy import Policy
from tetherl.workers.envs import env_factory
from tetherl.workers.masks import mask_in
from tetherl.workers.spec import WorkerSpec


@dataclass(frozen=True)
class EvaluationResult:
    """Raw returns and lengths of the episodes, in the order of their slots."""

    returns: list[float]
    lengths: list[int]
    version: int


class Evaluator:
    """Runs a fixed number of episodes per environment slot and counts all of them.

    The first N to finish would favour short episodes. Environments, recurrent states and seeds are its own; the seeds
    are the same for every evaluation of a run, so that scores can be compared.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        set_up_torch(spec.threads, spec.device)
        self._spec = spec
        self._envs = [env_factory(spec.env, spec.env_config)() for _ in range(spec.envs)]
        self._policy = Policy(
            self._envs[0].observation_space, self._envs[0].action_space, spec.model, seed=spec.seed
        ).to(spec.device)
        self._version = 0

    def set_weights(self, weights: dict[str, np.ndarray], version: int) -> None:
        self._policy.load_weights(weights)
        self._version = version

    def evaluate(self, episodes: int, explore: bool = False, first: int = 0) -> EvaluationResult:
        """Play episodes number `first` to `first + episodes - 1`; the number decides the seed.

        With explore=False each action is the policy's most probable one.
        """
        seeds = np.random.SeedSequence([self._spec.seed, 0xE7A1]).spawn(first + episodes + 1)
        generator = torch.Generator().manual_seed(int(seeds[0].generate_state(1)[0]) + first)
        queues: list[list[int]] = [[] for _ in self._envs]
        for number in range(first, first + episodes):
            queues[number % len(queues)].append(number)
        slots = [_Slot(env, self._policy, q, seeds) for env, q in zip(self._envs, queues, strict=True) if q]
        while active := [s for s in slots if not s.finished]:
            self._step(active, explore, generator)
        done = sorted(result for slot in slots for result in slot.results)
        return EvaluationResult([r[1] for r in done], [r[2] for r in done], self._version)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _step(self, slots: list[_Slot], explore: bool, generator: torch.Generator) -> None:
        policy = self._policy
        result = policy.act(
            policy.codec.stack([s.obs for s in slots]),
            np.stack([s.prev_action for s in slots]),
            np.array([s.prev_reward for s in slots], np.float32),
            np.array([s.has_prev for s in slots], bool),
            np.stack([s.state for s in slots]) if policy.is_recurrent else None,
            explore=explore,
            generator=generator,
            mask=stack_masks([s.mask for s in slots], policy.dist.inputs_size),
        )
        for i, slot in enumerate(slots):
            slot.step(result.actions[i], result.state[i] if result.state is not None else None)


class _Slot:
    """One environment copy and the episodes it has still to play."""

    def __init__(self, env: Any, policy: Policy, numbers: list[int], seeds: list[np.random.SeedSequence]) -> None:
        self._env, self._policy, self._numbers, self._seeds = env, policy, list(numbers), seeds
        self.results: list[tuple[int, float, int]] = []
        self.finished = False
        self._reset()

    def _reset(self) -> None:
        if not self._numbers:
            self.finished = True
            return
        self._number = self._numbers.pop(0)
        obs, info = self._env.reset(seed=int(self._seeds[self._number + 1].generate_state(1)[0]))
        self.obs = self._policy.codec.encode(obs)
        self.mask = mask_in(info, self._policy.actions, f"{self._number} of the evaluation")
        self.prev_action = np.zeros(self._policy.actions.width, self._policy.actions.dtype)
        self.prev_reward, self.has_prev = 0.0, False
        self.state = np.zeros(self._policy.state_size, np.float32)
        self._return, self._length = 0.0, 0

    def step(self, action: np.ndarray, state: np.ndarray | None) -> None:
        obs, reward, terminated, truncated, info = self._env.step(self._policy.actions.to_env(action))
        self._return += float(reward)
        self._length += 1
        if terminated or truncated:
            self.results.append((self._number, self._return, self._length))
            self._reset()
            return
        self.obs = self._policy.codec.encode(obs)
        self.mask = mask_in(info, self._policy.actions, f"{self._number} of the evaluation")
        self.prev_action, self.prev_reward, self.has_prev = action, float(reward), True
        if state is not None:
            self.state = state
