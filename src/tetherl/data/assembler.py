"""Turns the steps of one episode into fragments. Used by environment workers and the policy server alike.

The order of calls for each step is `decided` (an action was chosen in an observation), then `result` (its reward and
the next observation are known) or `end`. A row counts as received when its result arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tetherl.data.fragment import Fragment, Leaves, StepCounts, stack_masks

ROW_BYTES = 600
"""What a row costs besides its arrays' own numbers: objects and array headers."""


@dataclass(slots=True)
class _Row:
    """A step whose result is not known yet."""

    obs: Leaves
    action: np.ndarray
    logp: float
    dist: np.ndarray
    version: int
    by_policy: bool
    learning: bool
    t: int
    state_in: np.ndarray | None
    prev_action: np.ndarray | None
    prev_reward: float
    return_before: float
    mask: np.ndarray | None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = ROW_BYTES + self.action.nbytes + self.dist.nbytes
        for array in self.obs.values():
            size += array.nbytes
        if self.state_in is not None:
            size += self.state_in.nbytes
        if self.mask is not None:
            size += self.mask.nbytes
        self.nbytes = size

    def drop_state(self) -> None:
        if self.state_in is not None:
            self.nbytes -= self.state_in.nbytes
            self.state_in = None


class EpisodeAssembler:
    """Rows of one episode -> fragments, given to `sink`. Never blocks, does no I/O.

    With `truncate_episodes` a fragment is cut every `fragment_length` rows; with `complete_episodes` it is the whole
    episode. A cut fragment bootstraps from the observation after its last row, exactly like a truncation.

    `fate` is what becomes of rows whose action was chosen while the learner learned: under `discard` they are counted
    `discarded` and the fragment ends before the gap (with complete_episodes the rest of the episode is dropped as
    `incomplete`); under `keep` and `hold` they are rows like any other.

    `state_every` > 0: besides the recurrent state of a fragment's first row, that of every so many rows travels along.

    `gamma` discounts the running sum of rewards that fragments carry on from one to the next (G ← γ·G + r).

    With `training=False` nothing is stored or counted; only the episode's return and length are kept.
    """

    def __init__(
        self,
        books: StepCounts,
        sink: Callable[[Fragment], None],
        *,
        episode_id: str,
        worker: int,
        batch_mode: str = "truncate_episodes",
        fragment_length: int = 128,
        fate: str = "keep",
        state_every: int = 0,
        gamma: float = 0.0,
        training: bool = True,
    ) -> None:
        self.episode_id = episode_id
        self.training = training
        self.steps = 0
        self.episode_return = 0.0
        self.nbytes = 0
        self.prev_action: np.ndarray | None = None
        self.prev_reward = 0.0
        self._books = books
        self._sink = sink
        self._worker = worker
        self._whole = batch_mode == "complete_episodes"
        self._fragment_length = fragment_length
        self._state_every = state_every
        self._gamma = gamma
        self._discounted = 0.0
        self._discard = fate == "discard"
        self._spoiled = False  # complete_episodes: a row was discarded, the rest cannot be trained on
        self._rows: list[_Row] = []
        self._rewards: list[float] = []
        self._open: _Row | None = None
        self._next_obs: Leaves | None = None  # observation after the last completed row

    def decided(
        self,
        obs: Leaves,
        action: np.ndarray,
        logp: float,
        dist: np.ndarray,
        version: int,
        *,
        state_in: np.ndarray | None = None,
        by_policy: bool = True,
        learning: bool = False,
        mask: np.ndarray | None = None,
    ) -> None:
        """An action was chosen in `obs`. `state_in` is the recurrent state that was fed with it; `mask` [P] bool the
        choices that were allowed (None: all)."""
        if self._open is not None:
            raise RuntimeError(f"episode {self.episode_id}: step {self.steps} was decided twice")
        self._open = _Row(
            obs,
            action,
            logp,
            dist,
            version,
            by_policy,
            learning,
            self.steps,
            state_in,
            self.prev_action,
            self.prev_reward,
            self._discounted,
            mask,
        )
        self.nbytes += self._open.nbytes

    def result(self, reward: float, next_obs: Leaves) -> None:
        """The open row brought `reward` and led to `next_obs`."""
        self._complete(reward)
        self._next_obs = next_obs
        if not self._whole and len(self._rows) >= self._fragment_length:
            self._emit(next_obs)

    def end(self, reward: float, *, terminated: bool, truncated: bool, final_obs: Leaves | None) -> tuple[float, int]:
        """The episode is over; returns its (return, length). When both flags are set, termination wins."""
        if self._open is not None:
            self._complete(reward)
        truncated = truncated and not terminated
        if self._rows:
            self._emit(None if terminated else final_obs, terminated=terminated, truncated=truncated)
        return self.episode_return, self.steps

    def cut(self) -> None:
        """Emit the completed rows now; the episode goes on in the next fragment."""
        if self._rows:
            self._emit(self._open.obs if self._open is not None else self._next_obs)

    def abort(self) -> None:
        """The episode cannot go on: completed rows are cut and emitted, an open row without a result is dropped."""
        self.cut()
        if self._open is not None:
            self.nbytes -= self._open.nbytes
            self._open = None

    def _complete(self, reward: float) -> None:
        row = self._open
        if row is None:
            raise RuntimeError(f"episode {self.episode_id}: a result came without a decision")
        self._open = None
        self.nbytes -= row.nbytes
        self.steps += 1
        self.episode_return += reward
        self.prev_action, self.prev_reward = row.action, reward
        self._discounted = self._gamma * self._discounted + reward
        if not self.training:
            return
        self._books.received += 1
        if row.learning:
            self._books.received_learning += 1
        if row.learning and self._discard:
            self._spoil_or_cut(row)
            self._books.drop("discarded", 1)
            return
        if self._spoiled:
            self._books.drop("incomplete", 1)
            return
        if self._rows and not (self._state_every and len(self._rows) % self._state_every == 0):
            row.drop_state()  # only a fragment's first row needs it: the learner recomputes the others
        self._rows.append(row)
        self._rewards.append(reward)
        self._books.open += 1
        self.nbytes += row.nbytes

    def _spoil_or_cut(self, row: _Row) -> None:
        """A row is about to be discarded: end the fragment before the gap, or give the whole episode up."""
        if self._whole:
            self._spoiled = True
            self._books.drop("incomplete", len(self._rows))
            self._forget_rows()
        elif self._rows:
            self._emit(row.obs)

    def _forget_rows(self) -> None:
        self._books.open -= len(self._rows)
        self.nbytes -= sum(row.nbytes for row in self._rows)
        self._rows, self._rewards = [], []

    def _emit(self, final_obs: Leaves | None, *, terminated: bool = False, truncated: bool = False) -> None:
        rows = self._rows
        first = rows[0]
        fragment = Fragment(
            obs={name: np.stack([r.obs[name] for r in rows]) for name in first.obs},
            final_obs=final_obs,
            actions=np.stack([r.action for r in rows]),
            logp=np.array([r.logp for r in rows], np.float32),
            dist=np.stack([r.dist for r in rows]),
            rewards=np.array(self._rewards, np.float32),
            versions=np.array([r.version for r in rows], np.int64),
            by_policy=np.array([r.by_policy for r in rows], bool),
            terminated=terminated,
            truncated=truncated,
            episode_id=self.episode_id,
            t0=first.t,
            worker=self._worker,
            state_in=first.state_in,
            prev_action=first.prev_action,
            prev_reward=first.prev_reward,
            return_before=first.return_before,
            states=self._states(rows),
            state_every=self._state_every,
            learning=np.array([r.learning for r in rows], bool) if any(r.learning for r in rows) else None,
            mask=stack_masks([r.mask for r in rows], len(first.dist)),
        )
        self._forget_rows()
        self._books.emitted += len(fragment)
        self._sink(fragment)

    def _states(self, rows: list[_Row]) -> np.ndarray | None:
        if not self._state_every:
            return None
        states = [r.state_in for r in rows[:: self._state_every]]
        return np.stack([s for s in states if s is not None]) if states[0] is not None else None
