"""Rollout worker for environments that tetherl steps itself."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tetherl.data.assembler import EpisodeAssembler
from tetherl.data.fragment import EpisodeStats, Fragment, Leaves, Sample, StepCounts, stack_masks
from tetherl.errors import SpaceError
from tetherl.models.numerics import set_up_torch
from tetherl.models.policy import Policy
from tetherl.workers.masks import masks_in
from tetherl.workers.spec import WorkerSpec
from tetherl.workers.vector import EnvVector


class RolloutWorker:
    """Steps `envs` copies of one environment as a vector and turns the steps into fragments.

    Between two calls of `sample` no environment step is taken. `interrupt` may be called from another thread: a
    running `sample` then returns what it has.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        set_up_torch(spec.threads, spec.device)
        self._spec = spec
        # With the steps taken so far: a run that is resumed often must not meet the same episodes each time.
        own, envs = np.random.SeedSequence([spec.seed, spec.index, spec.start]).spawn(2)
        with _naming(spec):
            self._env = EnvVector(spec.env, spec.env_config, spec.envs, envs, spec.vectorization)
        self._policy = Policy(self._env.observation_space, self._env.action_space, spec.model, seed=spec.seed)
        self._policy.to(spec.device)
        self._generator = torch.Generator().manual_seed(int(own.generate_state(1, np.uint64)[0] >> 1))
        self._version = 0
        self._books = StepCounts()
        self._fragments: list[Fragment] = []
        self._episodes: list[EpisodeStats] = []
        self._episode_count = 0
        self._interrupted = 0  # calls of `sample` up to this number are to return
        self._sampling = threading.Lock()
        self._slots = [self._new_assembler() for _ in range(spec.envs)]
        # What the policy is fed besides the observation; rows of an episode's first step are never looked at.
        self._state = np.zeros((spec.envs, self._policy.state_size), np.float32)
        self._prev_action = np.zeros((spec.envs, self._policy.actions.width), self._policy.actions.dtype)
        self._prev_reward = np.zeros(spec.envs, np.float32)
        self._has_prev = np.zeros(spec.envs, bool)
        self._cut_off = np.zeros(spec.envs, bool)  # copies whose episode was ended here, not by the environment
        self._events: list[dict[str, Any]] = []
        self._events_told = 0

    def set_weights(self, weights: dict[str, np.ndarray], version: int) -> None:
        self._policy.load_weights(weights)
        self._version = version

    def interrupt(self, number: int) -> None:
        """Make `sample` calls up to `number` return with what they have, also one that has not begun yet."""
        self._interrupted = max(self._interrupted, number)

    def sample(self, steps: int, number: int = sys.maxsize) -> Sample:
        """Take `steps` steps in each environment copy, on average and at least in all (fewer when interrupted).

        With truncate_episodes all open fragments are cut at the end, so the sample holds every step taken. `number`
        grows from call to call; `interrupt` refers to it (without one only `close` interrupts).
        """
        with self._sampling:
            return self._sample(steps, number)

    def _sample(self, steps: int, number: int) -> Sample:
        started, env_s = time.perf_counter(), self._env.seconds
        missing = steps * self._spec.envs
        with _naming(self._spec):
            while missing > 0 and self._interrupted < number:
                missing -= self._step()
        if self._spec.batch_mode == "truncate_episodes":
            for slot in self._slots:
                slot.cut()
        fragments, self._fragments = self._fragments, []
        episodes, self._episodes = self._episodes, []
        info = {"sample_s": time.perf_counter() - started, "env_s": self._env.seconds - env_s}
        events, self._events_told = self._events[self._events_told :], len(self._events)
        return Sample(self._spec.index, fragments, episodes, self._books.copy(), info, events)

    def close(self) -> None:
        self._interrupted = sys.maxsize
        with self._sampling:  # never while a step is being taken
            self._env.close()

    def _step(self) -> int:
        """One step of the vector; returns the number of environment steps that it was."""
        env, policy, slots = self._env, self._policy, self._slots
        masks = masks_in(env.infos, policy.actions, [slot.episode_id for slot in slots], env.resetting)
        result = policy.act(
            env.observation,
            self._prev_action,
            self._prev_reward,
            self._has_prev,
            self._state if policy.is_recurrent else None,
            explore=True,
            generator=self._generator,
            mask=stack_masks(masks, policy.dist.inputs_size),
        )
        logp, resetting = result.logp.tolist(), env.resetting.tolist()
        for i, obs in enumerate(env.rows):
            if not resetting[i]:
                state = self._state[i] if policy.is_recurrent else None
                slots[i].decided(
                    obs, result.actions[i], logp[i], result.dist[i], self._version, state_in=state, mask=masks[i]
                )
        step = env.step(result.actions, policy.actions)
        rewards = step.rewards
        for i, obs in enumerate(env.rows):
            if i in step.finals:
                self._end(i, rewards[i], bool(step.terminated[i]), bool(step.truncated[i]), step.finals[i])
            elif not resetting[i]:
                if self._spec.max_episode_steps and slots[i].steps + 1 >= self._spec.max_episode_steps:
                    self._too_long(i, rewards[i], obs)
                else:
                    slots[i].result(rewards[i], obs)
        self._prev_action, self._prev_reward = result.actions, np.array(rewards, np.float32)
        self._has_prev = step.real & ~(step.terminated | step.truncated | self._cut_off)
        self._cut_off[:] = False
        if result.state is not None:
            # A fresh array: rows of the old one are kept by the assemblers. An episode begins with zeros.
            self._state = np.where(self._has_prev[:, None], result.state, np.float32(0))
        return resetting.count(False)

    def _end(self, copy: int, reward: float, terminated: bool, truncated: bool, final: Leaves) -> None:
        slot = self._slots[copy]
        total, length = slot.end(reward, terminated=terminated, truncated=truncated, final_obs=final)
        self._episodes.append(EpisodeStats(total, length, self._spec.index))
        self._slots[copy] = self._new_assembler()

    def _too_long(self, copy: int, reward: float, obs: Leaves) -> None:
        """The episode goes on, but as a new one: else an endless episode would be collected for ever."""
        if not self._events:
            limit = self._spec.max_episode_steps
            message = f"environment {self._spec.env}: an episode is longer than {limit} steps"
            message += "; with complete_episodes it is cut and bootstrapped there (this is said once)"
            self._events.append({"kind": "warning", "worker": self._spec.index, "message": message})
        self._end(copy, reward, terminated=False, truncated=True, final=obs)
        self._cut_off[copy] = True

    def _new_assembler(self) -> EpisodeAssembler:
        self._episode_count += 1
        return EpisodeAssembler(
            self._books,
            self._fragments_sink,
            episode_id=f"{self._spec.index}-{self._episode_count}",
            worker=self._spec.index,
            batch_mode=self._spec.batch_mode,
            fragment_length=self._spec.fragment_length,
            state_every=self._spec.state_every,
            gamma=self._spec.gamma,
        )

    def _fragments_sink(self, fragment: Fragment) -> None:
        self._fragments.append(fragment)


@contextlib.contextmanager
def _naming(spec: WorkerSpec) -> Iterator[None]:
    """Says in which worker and environment something did not fit its space."""
    try:
        yield
    except SpaceError as error:
        raise SpaceError(f"rollout worker {spec.index}, environment {spec.env}: {error}") from None
