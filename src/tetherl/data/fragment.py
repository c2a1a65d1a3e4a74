"""What travels from rollout workers to the learner: fragments, and what is said about them.

The one table of shapes. T is the number of rows (env steps) in a fragment, A the width of an action row,
P the number of distribution inputs, S the size of a flattened recurrent state.

| field          | shape          | dtype            | meaning                                                     |
|----------------|----------------|------------------|-------------------------------------------------------------|
| obs[leaf]      | [T, *leaf]     | the space's own  | observation in which the row's action was chosen            |
| final_obs[leaf]| [*leaf]        | the space's own  | observation after the last row; None only after termination |
| actions        | [T, A]         | int64 or float32 | action row as the policy sampled it (before clipping/scaling)|
| logp           | [T]            | float32          | log-probability under the behaviour policy                  |
| dist           | [T, P]         | float32          | distribution inputs of the behaviour policy                 |
| rewards        | [T]            | float32          | reward that followed the row's action                       |
| versions       | [T]            | int64            | policy version that chose the action                        |
| by_policy      | [T]            | bool             | False: the action was not the policy's; context only        |
| state_in       | [S] or None    | float32          | recurrent state fed at the first row                        |
| states         | [K, S] or None | float32          | as state_in, at the rows 0, n, 2n, ...; n is state_every    |
| prev_action    | [A] or None    | as actions       | action before the first row; None at an episode's start     |
| return_before  | one number     | float            | discounted sum of the episode's rewards before the first row|
| learning       | [T] or None    | bool             | True: the action was chosen while the learner learned       |
| mask           | [T, P] or None | bool             | choices that were allowed; None: all, on every row          |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Leaves = dict[str, np.ndarray]
"""An observation as flat leaves: path -> array. A plain Box or Discrete space has one leaf, named ''."""

DROP_REASONS = (
    "stale",
    "overflow",
    "discarded",
    "incomplete",
    "not_policy",
    "quarantined",
    "worker_lost",
    "restart",
)
"""Why an env step that was received is never trained on."""


@dataclass(slots=True)
class Fragment:
    """Contiguous steps of one episode, with everything needed to train on them. Shapes: the table above."""

    obs: Leaves
    final_obs: Leaves | None
    actions: np.ndarray
    logp: np.ndarray
    dist: np.ndarray
    rewards: np.ndarray
    versions: np.ndarray
    by_policy: np.ndarray
    terminated: bool
    truncated: bool
    episode_id: str
    t0: int  # position of the first row in its episode
    worker: int
    state_in: np.ndarray | None = None
    prev_action: np.ndarray | None = None
    prev_reward: float = 0.0
    return_before: float = 0.0  # with the assembler's gamma
    states: np.ndarray | None = None
    state_every: int = 0
    learning: np.ndarray | None = None  # None: no row was decided while the learner learned
    mask: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        total = 0
        for leaves in (self.obs, self.final_obs or {}):
            total += sum(a.nbytes for a in leaves.values())
        for a in (self.actions, self.logp, self.dist, self.rewards, self.versions, self.by_policy):
            total += a.nbytes
        for optional in (self.state_in, self.states, self.mask):
            total += optional.nbytes if optional is not None else 0
        return total


@dataclass(slots=True)
class EpisodeStats:
    """One finished episode, as it was played: raw rewards, whole length."""

    episode_return: float
    length: int
    worker: int
    client: str = ""


@dataclass(slots=True)
class StepCounts:
    """One worker's books. `received = emitted + open + sum(dropped)`, to the step, at every moment.

    received: env steps offered for training; emitted: steps that left in fragments; open: steps in open
    fragments; dropped: by reason (see DROP_REASONS). received_learning: those of `received` whose action was chosen
    while the learner learned.
    """

    received: int = 0
    emitted: int = 0
    open: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    received_learning: int = 0

    def drop(self, reason: str, steps: int) -> None:
        if steps:
            self.dropped[reason] = self.dropped.get(reason, 0) + steps

    def copy(self) -> StepCounts:
        return StepCounts(self.received, self.emitted, self.open, dict(self.dropped), self.received_learning)


@dataclass(slots=True)
class Sample:
    """What `sample()` of a worker returns. `counts` are the books after `fragments` have left."""

    worker: int
    fragments: list[Fragment]
    episodes: list[EpisodeStats]
    counts: StepCounts
    info: dict[str, float] = field(default_factory=dict)
    """Numbers that describe the worker since the last sample (clients, requests, mean batch, ...)."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What happened at the worker since the last sample; each has a `kind` (client_joined, client_left, ...)."""


def stack_masks(masks: Sequence[np.ndarray | None], choices: int) -> np.ndarray | None:
    """Action masks [P] of N decisions -> [N, P]; None, which allows all `choices`, if no decision has one."""
    if all(mask is None for mask in masks):
        return None
    return np.stack([np.ones(choices, bool) if mask is None else mask for mask in masks])
