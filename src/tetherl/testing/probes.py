"""Probe environments: tiny tasks whose answer is known exactly, to be looked at first when learning goes wrong.

Each isolates one thing that an implementation can get wrong without a crash: P1 fails when values are learned wrongly,
P6 when a time limit is taken for an end, P8 when memory does not reach the learner, and so on. The docstrings give the
exact answers; γ is the discount. P15 is `Cue` (P8) with a policy that changes while an episode runs.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Observation = Any


class Probe(gymnasium.Env[Observation, Any]):
    """Base: `look() -> observation`, `play(action) -> reward`, and termination after `length` steps."""

    observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)
    length = 1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.begin()
        return self.look(), self.info()

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        reward = self.play(action)
        self.t += 1
        terminated, truncated = self.over()
        return self.look(), reward, terminated, truncated, self.info()

    def begin(self) -> None:
        """A new episode."""

    def look(self) -> Observation:
        return _vector(0.0)

    def play(self, action: Any) -> float:
        raise NotImplementedError

    def over(self) -> tuple[bool, bool]:
        """(terminated, truncated) after `t` steps."""
        return self.t == self.length, False

    def info(self) -> dict[str, Any]:
        return {}


class CertainReward(Probe):
    """P1: one step, reward 1. V = 1."""

    def play(self, action: Any) -> float:
        return 1.0


class SeenReward(Probe):
    """P2: one step, the observation, -1 or 1, is the reward. V(x) = x."""

    def begin(self) -> None:
        self.sign = float(self.np_random.choice([-1.0, 1.0]))

    def look(self) -> Observation:
        return _vector(self.sign)

    def play(self, action: Any) -> float:
        return self.sign


class LateReward(Probe):
    """P3: two steps, observations 0 and 1, reward 1 for the second only. V = (γ, 1)."""

    length = 2

    def look(self) -> Observation:
        return _vector(float(self.t > 0))

    def play(self, action: Any) -> float:
        return float(self.t == 1)


class BetterAction(Probe):
    """P4: one step; action 1 earns 1, action 0 earns -1."""

    def play(self, action: Any) -> float:
        return 1.0 if action == 1 else -1.0


class MatchSign(SeenReward):
    """P5: one step; the action that fits the observation earns 1, the other 0."""

    def play(self, action: Any) -> float:
        return 1.0 if action == (self.sign > 0) else 0.0


class TimeLimit(Probe):
    """P6: reward 1 at every step, never an end, but a time limit of 10 steps.

    V = 1 / (1 - γ): 10 at γ = .9. With `limit_is_end` the limit is reported as termination, the classic mistake: a
    critic trained with λ = 1 then converges to 4.138, the mean over the ten positions.
    """

    length = 10

    def __init__(self, limit_is_end: bool = False) -> None:
        self._limit_is_end = limit_is_end

    def play(self, action: Any) -> float:
        return 1.0

    def over(self) -> tuple[bool, bool]:
        limit = self.t == self.length
        return limit and self._limit_is_end, limit and not self._limit_is_end


class TwoTimeLimits(Probe):
    """P7: the observation is min(t, 10), each step taken at 10 earns 1; truncated at 10 or at 20, by chance.

    V(x) = γ^(10 - x) / (1 - γ); a bootstrap that looks at the next episode's first observation gives less.
    """

    observation_space = spaces.Discrete(11)

    def begin(self) -> None:
        self.length = int(self.np_random.choice([10, 20]))

    def look(self) -> Observation:
        return min(self.t, 10)

    def play(self, action: Any) -> float:
        return float(self.t >= 10)

    def over(self) -> tuple[bool, bool]:
        return False, self.t == self.length


class Cue(Probe):
    """P8: a cue, -1 or 1, eight empty steps, a choice: 1 if it is that of the cue, else -1. Without memory: 0.

    The observation is [cue or 0, whether to choose now].
    """

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    length = 10

    def begin(self) -> None:
        self.cue = int(self.np_random.integers(2))

    def look(self) -> Observation:
        return _vector(2.0 * self.cue - 1 if self.t == 0 else 0.0, float(self.t == self.length - 1))

    def play(self, action: Any) -> float:
        if self.t < self.length - 1:
            return 0.0
        return 1.0 if action == self.cue else -1.0


class Alternate(Probe):
    """P9: 11 steps; an action that differs from the one before earns 1. Best 10; without memory at most 5."""

    length = 11

    def begin(self) -> None:
        self.last: int | None = None

    def play(self, action: Any) -> float:
        reward = float(self.last is not None and action != self.last)
        self.last = int(action)
        return reward


class HiddenArm(Probe):
    """P10: ten pulls at two arms, one of which always earns 1, the other 0; which one is hidden. Best 9.5 in the mean.

    Needs memory and the previous action and reward as inputs; without them 5.
    """

    length = 10

    def begin(self) -> None:
        self.good = int(self.np_random.integers(2))

    def play(self, action: Any) -> float:
        return float(action == self.good)


class OnlyValid(Probe):
    """P11: five steps, ten actions; those in `info["action_mask"]` are valid, any other raises ValueError. Return 1.

    The observation says, too, which are valid. With `tell_mask` false the info does not: the policy must fail.
    """

    observation_space = spaces.Box(0.0, 1.0, (10,), np.float32)
    action_space = spaces.Discrete(10)
    length = 5

    def __init__(self, tell_mask: bool = True) -> None:
        self._tell_mask = tell_mask

    def look(self) -> Observation:
        self.valid = self.np_random.random(10) < 0.3
        self.valid[self.np_random.integers(10)] = True
        return self.valid.astype(np.float32)

    def play(self, action: Any) -> float:
        if not self.valid[action]:
            raise ValueError(f"action {action} is not valid here; valid are {np.flatnonzero(self.valid).tolist()}")
        return 1 / self.length

    def info(self) -> dict[str, Any]:
        return {"action_mask": self.valid.astype(np.int8)} if self._tell_mask else {}


class MatchPair(Probe):
    """P12: one step; the observation is a pair, the action the same pair: 1, else 0. Random: 1/12."""

    observation_space = action_space = spaces.MultiDiscrete([3, 4])

    def begin(self) -> None:
        self.target = self.np_random.integers([3, 4])

    def look(self) -> Observation:
        return self.target

    def play(self, action: Any) -> float:
        return float(np.array_equal(action, self.target))


class BrightCells(Probe):
    """P13: an image of 60×80 pixels with 3×3 bright or dark cells, and nine keys; the reward is the share of keys
    that are pressed exactly where a cell is bright. Random: .5, best: 1."""

    observation_space = spaces.Box(0, 255, (60, 80, 1), np.uint8)
    action_space = spaces.MultiDiscrete([2] * 9)

    def begin(self) -> None:
        self.bright = self.np_random.integers(2, size=9)

    def look(self) -> Observation:
        image = np.zeros((60, 80, 1), np.uint8)
        for cell in np.flatnonzero(self.bright):
            row, column = divmod(int(cell), 3)
            image[20 * row : 20 * row + 18, 27 * column : 27 * column + 24] = 200
        return image

    def play(self, action: Any) -> float:
        return float(np.mean(action == self.bright))


class HitTarget(Probe):
    """P14: one step; a number in [300, 500] that should hit 400 + 100 x, where x in [-1, 1] is the observation.

    The reward is -((action - 400) / 100 - x)², so that 0 is best. Raises ValueError for an action out of bounds.
    """

    action_space = spaces.Box(300.0, 500.0, (1,), np.float32)

    def begin(self) -> None:
        self.target = float(self.np_random.uniform(-1, 1))

    def look(self) -> Observation:
        return _vector(self.target)

    def play(self, action: Any) -> float:
        if not 300 <= action[0] <= 500:
            raise ValueError(f"action {action[0]} is outside [300, 500]")
        return -(((float(action[0]) - 400) / 100 - self.target) ** 2)


def _vector(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)
