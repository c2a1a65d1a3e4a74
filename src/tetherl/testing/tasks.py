"""Small tasks with a known best score, for acceptance tests and examples; `env: "tetherl.testing.tasks:NAME"`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class RepeatAfterMe(gymnasium.Env[Any, Any]):
    """Say the bit that was seen `delay` steps ago: +1 if right, -1 if wrong, for `length` steps.

    In the first `delay` steps the right answer is 0. Without memory the mean return is 0, with it `length`.
    """

    def __init__(self, delay: int = 2, length: int = 100) -> None:
        self.observation_space = spaces.Discrete(2)
        self.action_space = spaces.Discrete(2)
        self._delay, self._length = delay, length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self._seen = [0] * self._delay
        return self._look(), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        right = action == self._seen[-1 - self._delay]
        over = len(self._seen) - self._delay == self._length
        return self._look(), 1.0 if right else -1.0, over, False, {}

    def _look(self) -> int:
        self._seen.append(int(self.np_random.integers(2)))
        return self._seen[-1]


class CartPoleNoVelocity(gymnasium.ObservationWrapper[np.ndarray, int, np.ndarray]):
    """CartPole-v1 that shows where cart and pole are, not how fast they move: [2] position, angle."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


def flat_minigrid(id: str) -> gymnasium.Env[np.ndarray, int]:
    """A MiniGrid environment with its view and its mission as one vector of numbers (needs `minigrid`)."""
    import minigrid  # noqa: F401 - registers the environments
    from minigrid.wrappers import FlatObsWrapper

    return FlatObsWrapper(gymnasium.make(id))
