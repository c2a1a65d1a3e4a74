"""From fragments to one batch of packed rows: fragment after fragment, no padding.

The table of shapes. N rows in all, F fragments, A action width, P distribution inputs, S state size.

| field           | shape       | dtype            | meaning                                             |
|-----------------|-------------|------------------|-----------------------------------------------------|
| obs[leaf]       | [N, *leaf]  | the space's own  | observation in which the row's action was chosen    |
| final_obs[leaf] | [F, *leaf]  | the space's own  | observation after a fragment's last row; or zeros   |
| actions         | [N, A]      | int64 or float32 | action row as sampled                               |
| logp            | [N]         | float32          | log-probability under the behaviour policy          |
| dist            | [N, P]      | float32          | distribution inputs of the behaviour policy         |
| rewards         | [N]         | float32          | reward that followed the row's action               |
| lag             | [N]         | int64            | learner's version minus the row's version           |
| valid           | [N]         | bool             | the row is trained on; other rows are context only  |
| prev_action     | [N, A]      | as actions       | action of the row before; zeros where there is none |
| prev_reward     | [N]         | float32          | reward of the row before; 0 where there is none     |
| has_prev        | [N]         | bool             | False on the first row of an episode                |
| lengths         | [F]         | int64            | rows of each fragment, N = sum(lengths)             |
| terminated      | [F]         | bool             | value after the last row is 0                       |
| state_in        | [F, S]/None | float32          | recurrent state at each fragment's first row        |
| mask            | [N, P]/None | bool             | choices that were allowed; None: all, everywhere    |
| stored_states   | [M, S]/None | float32          | recurrent states of the actor that came along       |
| stored_rows     | [M]/None    | int64            | the row in which each was fed, ascending            |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tetherl.data.fragment import Fragment, Leaves
from tetherl.errors import TrainingError


@dataclass(slots=True)
class SampleBatch:
    """Rows of several fragments, ready for the learner. Shapes: the table above."""

    obs: Leaves
    final_obs: Leaves
    actions: np.ndarray
    logp: np.ndarray
    dist: np.ndarray
    rewards: np.ndarray
    lag: np.ndarray
    valid: np.ndarray
    prev_action: np.ndarray
    prev_reward: np.ndarray
    has_prev: np.ndarray
    lengths: np.ndarray
    terminated: np.ndarray
    state_in: np.ndarray | None
    stored_states: np.ndarray | None = None
    stored_rows: np.ndarray | None = None
    mask: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def starts(self) -> np.ndarray:
        """[F] index of each fragment's first row."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def fragment_of_row(self) -> np.ndarray:
        """[N] index of the fragment that a row belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def fresh(self, recurrent: bool) -> np.ndarray:
        """[N] bool: rows for which the learner must compute exactly what the actor did.

        Lag 0; with recurrence also in all earlier rows of the fragment. A fragment that began with another version's
        rows reaches its later ones with another state than the actor had.
        """
        late = self.lag != 0
        if not recurrent:
            return ~late
        before = np.cumsum(late)
        return before == np.repeat(before[self.starts] - late[self.starts], self.lengths)

    @property
    def position_in_fragment(self) -> np.ndarray:
        """[N] 0 on the first row of a fragment."""
        return np.arange(len(self)) - np.repeat(self.starts, self.lengths)


def assemble(
    fragments: Sequence[Fragment], *, version: int, max_lag: int, state_size: int = 0
) -> tuple[SampleBatch | None, list[Fragment], dict[str, int]]:
    """Pack fragments into a batch and count the rows that are not trained on.

    A row is valid if the policy chose its action and its lag is in 0..max_lag. A row from a version that
    this learner has not reached (it was set back to a checkpoint) counts as stale: nothing is known of its
    policy. Fragments without a valid row are counted and left out.

    Returns (batch, the fragments in it, rows dropped by reason); the batch is None if no row is valid.
    """
    dropped: dict[str, int] = {}
    kept: list[Fragment] = []
    lags: list[np.ndarray] = []
    valids: list[np.ndarray] = []
    for fragment in fragments:
        _check(fragment, state_size)
        lag = version - fragment.versions
        fresh = (lag >= 0) & (lag <= max_lag)
        valid = fragment.by_policy & fresh
        for reason, rows in (("not_policy", ~fragment.by_policy), ("stale", fragment.by_policy & ~fresh)):
            count = int(rows.sum())
            if count:
                dropped[reason] = dropped.get(reason, 0) + count
        if valid.any():
            kept.append(fragment)
            lags.append(lag)
            valids.append(valid)
    if not kept:
        return None, [], dropped
    prev_action, prev_reward, has_prev = _previous(kept)
    leaves = kept[0].obs.keys()
    batch = SampleBatch(
        obs={leaf: np.concatenate([f.obs[leaf] for f in kept]) for leaf in leaves},
        final_obs={leaf: np.stack([_final_leaf(f, leaf) for f in kept]) for leaf in leaves},
        actions=np.concatenate([f.actions for f in kept]),
        logp=np.concatenate([f.logp for f in kept]),
        dist=np.concatenate([f.dist for f in kept]),
        rewards=np.concatenate([f.rewards for f in kept]).astype(np.float32, copy=False),
        lag=np.concatenate(lags),
        valid=np.concatenate(valids),
        prev_action=prev_action,
        prev_reward=prev_reward,
        has_prev=has_prev,
        lengths=np.array([len(f) for f in kept], dtype=np.int64),
        terminated=np.array([f.terminated for f in kept], dtype=bool),
        state_in=np.stack([_state_in(f, state_size) for f in kept]) if state_size else None,
        mask=_masks(kept),
        **(_stored_states(kept) if state_size else {}),
    )
    return batch, kept, dropped


def chunk_table(lengths: np.ndarray, max_seq_len: int) -> np.ndarray:
    """Cut fragments into chunks of at most `max_seq_len` rows, counted from each fragment's first row.

    lengths: [F]  ->  [C, 4] int64: fragment, position of the chunk's first row in its fragment, number of
    rows, index of its first row in the batch. In the order of the rows; no chunk spans two fragments.
    """
    counts = -(-lengths // max_seq_len)
    fragment = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(fragment)) - np.repeat(np.cumsum(counts) - counts, counts)
    position = number * max_seq_len
    rows = np.minimum(lengths[fragment] - position, max_seq_len)
    start = (np.cumsum(lengths) - lengths)[fragment] + position
    return np.stack([fragment, position, rows, start], axis=1).astype(np.int64)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenated index ranges: starts [C], lengths [C]  ->  [sum(lengths)] int64."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))


def _previous(fragments: list[Fragment]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Action and reward before each row: of the row before, or what the fragment says of its first row."""
    actions, rewards, known = [], [], []
    for f in fragments:
        carried = f.t0 > 0 and f.prev_action is not None
        first = f.prev_action if carried and f.prev_action is not None else np.zeros_like(f.actions[0])
        actions.append(np.concatenate([first[None].astype(f.actions.dtype), f.actions[:-1]]))
        rewards.append(np.concatenate([[f.prev_reward if carried else 0.0], f.rewards[:-1]]))
        has_prev = np.ones(len(f), dtype=bool)
        has_prev[0] = carried
        known.append(has_prev)
    return np.concatenate(actions), np.concatenate(rewards).astype(np.float32), np.concatenate(known)


def _masks(fragments: list[Fragment]) -> np.ndarray | None:
    if all(f.mask is None for f in fragments):
        return None
    return np.concatenate([np.ones(f.dist.shape, bool) if f.mask is None else f.mask for f in fragments])


def _final_leaf(fragment: Fragment, leaf: str) -> np.ndarray:
    if fragment.final_obs is None:
        return np.zeros_like(fragment.obs[leaf][0])
    return fragment.final_obs[leaf]


def _state_in(fragment: Fragment, state_size: int) -> np.ndarray:
    if fragment.t0 == 0 or fragment.state_in is None:
        return np.zeros(state_size, dtype=np.float32)
    return fragment.state_in


def _stored_states(fragments: list[Fragment]) -> dict[str, np.ndarray]:
    """The actor's states that came along, and the batch rows in which they were fed."""
    states, rows, start = [], [], 0
    for f in fragments:
        if f.states is not None:
            states.append(f.states)
            rows.append(start + f.state_every * np.arange(len(f.states)))
        start += len(f)
    return {"stored_states": np.concatenate(states), "stored_rows": np.concatenate(rows)} if states else {}


def _check(fragment: Fragment, state_size: int) -> None:
    """Refuse what cannot be trained on; anything here is a fault of whoever made the fragment."""
    where = (
        f"fragment of worker {fragment.worker}, episode {fragment.episode_id!r}, rows "
        f"{fragment.t0}..{fragment.t0 + len(fragment) - 1}"
    )
    if len(fragment) == 0:
        raise TrainingError(f"{where}: has no rows; a fragment needs at least one")
    if fragment.final_obs is None and not fragment.terminated:
        raise TrainingError(
            f"{where}: has no final_obs but did not terminate; the value after its last row needs that observation"
        )
    if fragment.mask is not None and fragment.mask.shape != fragment.dist.shape:
        raise TrainingError(
            f"{where}: mask has shape {fragment.mask.shape}, expected {fragment.dist.shape}, that of dist"
        )
    if state_size and fragment.state_in is not None and fragment.state_in.shape != (state_size,):
        raise TrainingError(
            f"{where}: state_in has shape {fragment.state_in.shape}, the policy's state has {(state_size,)}"
        )
