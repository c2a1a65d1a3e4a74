"""Copies of one environment stepped as one vector, with what Gymnasium's autoreset modes mean made explicit."""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from tetherl.data.fragment import Leaves
from tetherl.errors import ConfigError, SpaceError
from tetherl.spaces import ActionCodec, ObservationCodec
from tetherl.workers.envs import env_factory, is_gymnasium_id

Vectorization = Literal["auto", "sync", "async", "own"]


@dataclass(slots=True)
class VectorStep:
    """What one step of B copies gave. Arrays are the caller's own.

    real [B] bool: the copy took a step; False where the environment only reset itself, and ignored the action: such a
    row is no transition, and the other arrays say nothing of it. rewards [B] numbers; terminated, truncated [B] bool;
    finals {copy: observation after its last step} of the episodes that ended.
    """

    real: np.ndarray
    rewards: list[float]
    terminated: np.ndarray
    truncated: np.ndarray
    finals: dict[int, Leaves]


class EnvVector:
    """B copies of one environment.

    Both autoreset modes give the same transitions. SAME_STEP: the step that ends an episode returns the next one's
    first observation, and the final one aside. NEXT_STEP: it returns the final one, and the step after it is no step:
    it only brings the first observation. ConfigError for an environment that does not say which mode it has.

    observation: {leaf: [B, *leaf]}, what the policy decides on next, checked and copied; rows: the same copy by copy,
    as views that stay as they are. resetting [B] bool: the coming step is a reset, and `observation` holds the final
    observation still. infos: those of the last reset or step, as Gymnasium batches them. seconds: time spent in the
    environments so far.
    """

    def __init__(
        self, env: Any, env_config: dict[str, Any], copies: int, seed: np.random.SeedSequence, mode: Vectorization
    ) -> None:
        self._name = str(env)
        self._env = _make(env, env_config, copies, mode)
        self._autoreset = _autoreset_mode(self._env, self._name)
        self.copies = copies
        self.observation_space, self.action_space = self._env.single_observation_space, self._env.single_action_space
        self._codec = ObservationCodec(_batched(self.observation_space, copies))
        self._single = ObservationCodec(self.observation_space)
        self._actions: Any = create_empty_array(self.action_space, copies)
        self._discrete = self.action_space.dtype if isinstance(self.action_space, spaces.Discrete) else None
        self.resetting = np.zeros(copies, bool)
        self.seconds = 0.0
        numbers = [int(n) for n in seed.generate_state(copies)]
        # An environment's own vector draws the copies' episodes from one generator.
        listed = isinstance(self._env, SyncVectorEnv | AsyncVectorEnv)
        seeds: Any = numbers if listed else numbers[0]
        observation, self.infos = self._env.reset(seed=seeds)
        self._take(observation)

    def step(self, actions: np.ndarray, codec: ActionCodec) -> VectorStep:
        """One step of all copies. actions: [B, A] rows as the policy sampled them."""
        values = [codec.to_env(row) for row in actions]
        if self._discrete is not None:  # what `concatenate` gives, in a fifth of the time
            batch: Any = np.array(values, self._discrete)
        else:
            batch = concatenate(self.action_space, values, self._actions)
        before = time.perf_counter()
        observation, rewards, terminated, truncated, self.infos = self._env.step(batch)
        self.seconds += time.perf_counter() - before
        self._take(observation)
        real = ~self.resetting
        numbers = [float(r) for r in rewards]
        for i, number in enumerate(numbers):
            if not math.isfinite(number):
                raise SpaceError(f"copy {i + 1} of {self.copies}: reward is {number}, expected a finite number")
        terminated, truncated = terminated & real, truncated & real
        done = terminated | truncated
        finals = {i: self._final(i) for i, over in enumerate(done.tolist()) if over}
        if self._autoreset is AutoresetMode.NEXT_STEP:
            self.resetting = done
        return VectorStep(real, numbers, terminated, truncated, finals)

    def close(self) -> None:
        self._env.close()

    def _final(self, copy: int) -> Leaves:
        if self._autoreset is AutoresetMode.NEXT_STEP:
            return self.rows[copy]
        return {name: array.copy() for name, array in self._single.encode(self.infos["final_obs"][copy]).items()}

    def _take(self, observation: Any) -> None:
        """Checked for all copies at once; copied, because environments reuse their buffers."""
        self.observation: Leaves = {name: array.copy() for name, array in self._codec.encode(observation).items()}
        self.rows: list[Leaves] = [{k: a[i] for k, a in self.observation.items()} for i in range(self.copies)]


def _make(env: Any, env_config: dict[str, Any], copies: int, mode: Vectorization) -> VectorEnv:
    if mode == "own" or (mode == "auto" and copies > 1 and _has_own(env, env_config)):
        if not is_gymnasium_id(env):
            raise ConfigError(
                f"rollouts.vectorization: own, but env {env!r} is no Gymnasium id, and only those can name a "
                "vectorised version (vector_entry_point). Set it to sync or async"
            )
        try:
            return gymnasium.make_vec(env, copies, vectorization_mode="vector_entry_point", **env_config)
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(
                f"rollouts.vectorization: own, but the vectorised version of env {env!r} cannot be made with "
                f"{env_config}: {error}. Set it to sync or async"
            ) from error
    make = env_factory(env, env_config)
    # Every row of every step is a transition then. Copies are made later, once for all.
    options: dict[str, Any] = {"copy": False, "autoreset_mode": AutoresetMode.SAME_STEP}
    if mode == "async":
        # Not forked: a fork of a process with threads may hang.
        return AsyncVectorEnv([make] * copies, context="spawn", **options)
    return SyncVectorEnv([make] * copies, **options)


def _has_own(env: Any, env_config: dict[str, Any]) -> bool:
    """Whether the environment's own vectorised version can stand in: it exists and takes the same settings."""
    if not is_gymnasium_id(env):
        return False
    try:
        spec = gymnasium.spec(env)
        entry = spec.vector_entry_point
        if entry is None or spec.additional_wrappers:
            return False
        create = entry if callable(entry) else load_env_creator(entry)
        settings = {**spec.kwargs, **env_config}
        if spec.max_episode_steps is not None:
            settings.setdefault("max_episode_steps", spec.max_episode_steps)
        inspect.signature(create).bind(num_envs=1, **settings)
    except (gymnasium.error.Error, ImportError, TypeError):
        return False
    return True


def _autoreset_mode(env: VectorEnv, name: str) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        said = f"says {mode}" if mode is not None else "does not say"
        raise ConfigError(
            f"env: the vectorised version of {name} {said} how its episodes begin anew: metadata['autoreset_mode'] "
            "must be AutoresetMode.SAME_STEP or NEXT_STEP, or resets would be taken for steps. Set "
            "rollouts.vectorization to sync or async, which make a vector of single copies, or correct the metadata"
        )
    return mode


def _batched(space: gymnasium.Space[Any], copies: int) -> gymnasium.Space[Any]:
    """The space of B observations, with the kinds of the leaves kept (Gymnasium makes a Box of MultiDiscrete)."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _batched(value, copies) for key, value in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_batched(value, copies) for value in space.spaces])
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = (np.broadcast_to(a, (copies, *space.shape)) for a in (space.nvec, space.start))
        return spaces.MultiDiscrete(nvec.copy(), dtype=space.dtype, start=start.copy())
    return batch_space(space, copies)
