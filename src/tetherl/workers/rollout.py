"""Rollout worker for environments that tetherl steps itself."""

from __future__ import annotations

import threading
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from tetherl.data.assembler import EpisodeAssembler
from tetherl.data.fragment import EpisodeStats, Fragment, Leaves, Sample, StepCounts
from tetherl.errors import SpaceError
from tetherl.models.policy import Policy
from tetherl.workers.envs import env_factory
from tetherl.workers.spec import WorkerSpec


class RolloutWorker:
    """Steps `envs` copies of one environment as a vector and turns the steps into fragments.

    Between two calls of `sample` no environment step is taken. `interrupt` may be called from another thread: a
    running `sample` then returns what it has.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._spec = spec
        make = env_factory(spec.env, spec.env_config)
        # SAME_STEP: the step that ends an episode returns the next one's first observation, so every row of every
        # step is a transition (the final observation is in the info).
        self._env = SyncVectorEnv([make] * spec.envs, autoreset_mode=AutoresetMode.SAME_STEP)
        seeds = np.random.SeedSequence([spec.seed, spec.index]).spawn(2)
        self._policy = Policy(
            self._env.single_observation_space, self._env.single_action_space, spec.model, seed=spec.seed
        ).to(spec.device)
        self._generator = torch.Generator().manual_seed(int(seeds[0].generate_state(1, np.uint64)[0] >> 1))
        self._version = 0
        self._books = StepCounts()
        self._fragments: list[Fragment] = []
        self._episodes: list[EpisodeStats] = []
        self._episode_count = 0
        self._interrupted = threading.Event()
        self._slots = [self._new_assembler() for _ in range(spec.envs)]
        observations, _ = self._env.reset(seed=[int(s) for s in seeds[1].generate_state(spec.envs)])
        self._obs = self._rows(observations)
        self._state = np.zeros((spec.envs, self._policy.state_size), np.float32)

    def set_weights(self, weights: dict[str, np.ndarray], version: int) -> None:
        self._policy.load_weights(weights)
        self._version = version

    def interrupt(self) -> None:
        """Make a running `sample` return with what it has."""
        self._interrupted.set()

    def sample(self, steps: int) -> Sample:
        """Take `steps` steps in each environment copy (fewer when interrupted).

        With truncate_episodes all open fragments are cut at the end, so the sample holds every step taken.
        """
        self._interrupted.clear()
        started, env_s = time.perf_counter(), 0.0
        for _ in range(steps):
            env_s += self._step()
            if self._interrupted.is_set():
                break
        if self._spec.batch_mode == "truncate_episodes":
            for slot in self._slots:
                slot.cut()
        fragments, self._fragments = self._fragments, []
        episodes, self._episodes = self._episodes, []
        info = {"sample_s": time.perf_counter() - started, "env_s": env_s}
        return Sample(self._spec.index, fragments, episodes, self._books.copy(), info)

    def close(self) -> None:
        self._env.close()

    def _step(self) -> float:
        """One step of every copy; returns the seconds spent in the environments."""
        policy, slots = self._policy, self._slots
        prev_action = np.stack(
            [
                np.zeros(policy.actions.width, policy.actions.dtype) if s.prev_action is None else s.prev_action
                for s in slots
            ]
        )
        result = policy.act(
            policy.codec.stack(self._obs),
            prev_action,
            np.array([s.prev_reward for s in slots], np.float32),
            np.array([s.prev_action is not None for s in slots], bool),
            self._state if policy.is_recurrent else None,
            explore=True,
            generator=self._generator,
        )
        for i, slot in enumerate(slots):
            slot.decided(
                self._obs[i],
                result.actions[i],
                float(result.logp[i]),
                result.dist[i],
                self._version,
                state_in=self._state[i] if policy.is_recurrent else None,
            )
        if policy.is_recurrent:
            self._state = np.array(result.state)  # a fresh array: rows of the old one are kept by the assemblers
        before = time.perf_counter()
        observations, rewards, terminated, truncated, infos = self._env.step(self._env_actions(result.actions))
        env_s = time.perf_counter() - before
        rows = self._rows(observations)
        for i, slot in enumerate(slots):
            reward = float(rewards[i])
            if not np.isfinite(reward):
                raise SpaceError(f"environment {self._spec.env}: reward is {reward}, expected a finite number")
            if terminated[i] or truncated[i]:
                final = self._encode(infos["final_obs"][i])
                episode_return, length = slot.end(
                    reward, terminated=bool(terminated[i]), truncated=bool(truncated[i]), final_obs=final
                )
                self._episodes.append(EpisodeStats(episode_return, length, self._spec.index))
                slots[i] = self._new_assembler()
                self._state[i] = 0
            else:
                slot.result(reward, rows[i])
        self._obs = rows
        return env_s

    def _env_actions(self, actions: np.ndarray) -> Any:
        values = [self._policy.actions.to_env(row) for row in actions]
        space = self._env.single_action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return np.array(values, space.dtype)
        return np.stack(values)

    def _rows(self, observations: Any) -> list[Leaves]:
        return [self._encode(o) for o in iterate(self._env.observation_space, observations)]

    def _encode(self, observation: Any) -> Leaves:
        try:
            return self._policy.codec.encode(observation)
        except SpaceError as error:
            raise SpaceError(f"rollout worker {self._spec.index}, environment {self._spec.env}: {error}") from None

    def _new_assembler(self) -> EpisodeAssembler:
        self._episode_count += 1
        return EpisodeAssembler(
            self._books,
            self._fragments_sink,
            episode_id=f"{self._spec.index}-{self._episode_count}",
            worker=self._spec.index,
            batch_mode=self._spec.batch_mode,
            fragment_length=self._spec.fragment_length,
        )

    def _fragments_sink(self, fragment: Fragment) -> None:
        self._fragments.append(fragment)
