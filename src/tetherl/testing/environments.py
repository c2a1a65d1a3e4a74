"""Gymnasium environments for tests."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

_MOST = float(2**24)  # up to here float32 counts without gaps


class CountingEnv(gymnasium.Env[np.ndarray, Any]):
    """An environment that counts, to be followed through a whole system.

    The observation, float32 [2], is [episode number, step number]: the first episode is 0, reset() gives step
    0, every step() one more. The reward of a step is its number, so an episode of length n returns
    n * (n + 1) / 2. Lengths are fixed by the seed: `length_of(episode)`. Actions change nothing.

    >>> env = CountingEnv(min_length=3, max_length=3)
    >>> env.reset()[0], env.step(0)
    (array([0., 0.], dtype=float32), (array([0., 1.], dtype=float32), 1.0, False, False, {}))
    """

    def __init__(
        self,
        *,
        min_length: int = 3,
        max_length: int = 12,
        ends: str = "terminate",
        action_space: gymnasium.Space[Any] | None = None,
        seed: int = 0,
    ) -> None:
        """`ends`: "terminate", "truncate", or "alternate" (odd episodes are truncated).

        Lengths are between `min_length` and `max_length` steps. `action_space`: two discrete actions if not
        given. `seed`: until reset(seed=...) gives another one, which also starts again at episode 0.
        """
        if ends not in ("terminate", "truncate", "alternate"):
            raise ValueError(f"ends is {ends!r}, expected 'terminate', 'truncate' or 'alternate'")
        if not 1 <= min_length <= max_length:
            raise ValueError(f"lengths from {min_length} to {max_length}: expected 1 <= min_length <= max_length")
        self.observation_space = gymnasium.spaces.Box(0.0, _MOST, (2,), np.float32)
        self.action_space = action_space if action_space is not None else gymnasium.spaces.Discrete(2)
        self._lengths = (min_length, max_length)
        self._ends = ends
        self._seed = seed
        self._episode = -1
        self._step = 0
        self._over = True

    def length_of(self, episode: int) -> int:
        """Steps of an episode."""
        low, high = self._lengths
        return int(np.random.default_rng((self._seed, episode)).integers(low, high, endpoint=True))

    def truncates(self, episode: int) -> bool:
        """Whether an episode is truncated at its end (else terminated)."""
        return self._ends == "truncate" or (self._ends == "alternate" and episode % 2 == 1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._seed = seed
            self._episode = -1
        self._episode += 1
        self._step = 0
        self._over = False
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._over:
            raise RuntimeError("step() after the end of the episode: call reset() first")
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not in {self.action_space}")
        self._step += 1
        self._over = self._step == self.length_of(self._episode)
        truncated = self._over and self.truncates(self._episode)
        return self._observation(), float(self._step), self._over and not truncated, truncated, {}

    def get_state(self) -> dict[str, Any]:
        """All that the future depends on, as JSON-able values; see `set_state`."""
        return {"seed": self._seed, "episode": self._episode, "step": self._step, "over": self._over}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `get_state` was called."""
        self._seed, self._episode = state["seed"], state["episode"]
        self._step, self._over = state["step"], state["over"]

    def _observation(self) -> np.ndarray:
        return np.array([self._episode, self._step], np.float32)
