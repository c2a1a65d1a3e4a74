"""What a batch needs before it is trained on: one pass of the current network over whole fragments.

The pass gives values, values after the last rows, log-probabilities and distribution inputs of the policy
at the start of the update ("prox"), and the recurrent state at the start of each chunk. From these follow
advantages and value targets. Values that were computed while acting are never used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tetherl.algorithms.parallel import Reduction
from tetherl.data.batch import SampleBatch, chunk_table, ranges
from tetherl.models.policy import Policy
from tetherl.ops.gae import gae

FORWARD_BYTES = 128 * 2**20
"""Observations, counted as float32, that go into one forward pass at most; at least MIN_FORWARD_ROWS rows."""
MIN_FORWARD_ROWS = 256
DEVICE_BYTES = 2**30
"""Observations of a batch up to this size are kept on an accelerator; larger ones go there piece by piece."""


@dataclass(slots=True)
class Inputs:
    """What the network reads, for any rows. Observations may stay on the host; `take` brings them over."""

    obs: dict[str, Tensor]
    prev_action: Tensor
    prev_reward: Tensor
    has_prev: Tensor
    device: torch.device

    def take(self, rows: np.ndarray | slice) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
        """(obs, prev_action, prev_reward, has_prev) of these rows, on the device."""
        if isinstance(rows, slice):
            obs = {k: v[rows].to(self.device, non_blocking=True) for k, v in self.obs.items()}
            return obs, self.prev_action[rows], self.prev_reward[rows], self.has_prev[rows]
        index = torch.from_numpy(rows)
        there = index.to(self.device)
        obs = {
            k: v.index_select(0, index if v.device.type == "cpu" else there).to(self.device, non_blocking=True)
            for k, v in self.obs.items()
        }
        return (
            obs,
            self.prev_action.index_select(0, there),
            self.prev_reward.index_select(0, there),
            self.has_prev.index_select(0, there),
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How batches are prepared; the settings of `AlgorithmConfig` of the same names, where there are such.

    reduction: with several learners each makes the pass over its share of the fragments; the results are exchanged.
    """

    gamma: float
    lam: float
    max_seq_len: int
    device: torch.device
    burn_in: int = 0
    stored_states: bool = False
    reward_scale: float = 1.0
    reward_clip: float | None = None
    reduction: Reduction | None = None


@dataclass(slots=True)
class PreparedBatch:
    """A batch with all that the epochs need. N rows, F fragments, C chunks; tensors are on the device.

    values, advantages and targets are in (scaled) reward units, not normalised. chunks is the table of `chunk_table`;
    burn_in [C] the number of rows before each chunk's first one that warm its state up, and chunk_states [C, S] the
    state at the first of these rows; all None without recurrence.
    finite [F]: every number of the fragment that the loss would use is finite.
    """

    batch: SampleBatch
    inputs: Inputs
    actions: Tensor  # [N, A]
    logp: Tensor  # [N] behaviour
    dist: Tensor  # [N, P] behaviour
    prox_logp: Tensor  # [N]
    prox_dist: Tensor  # [N, P]
    mask: Tensor | None  # [N, P] choices that were allowed, on both sides of every ratio and divergence
    values: Tensor  # [N]
    advantages: Tensor  # [N]
    targets: Tensor  # [N]
    chunks: np.ndarray | None
    chunk_states: Tensor | None
    finite: np.ndarray
    burn_in: np.ndarray | None = None


@dataclass(slots=True)
class _Pass:
    """What one pass over a batch gives. pieces [K, 4]: what went through in one go, as in `chunk_table`."""

    dist: Tensor  # [N, P]
    values: Tensor  # [N] in the critic's scale
    final_values: Tensor  # [F] value after each fragment's last row, in reward units; 0 after termination
    pieces: np.ndarray | None
    piece_states: Tensor | None  # [K, S] state at each piece's first row


@torch.no_grad()
def prepare(policy: Policy, batch: SampleBatch, recipe: Recipe) -> PreparedBatch:
    """Run the pass over `batch` and compute advantages and value targets."""
    device = recipe.device
    inputs = _inputs(batch, device)
    actions = torch.from_numpy(batch.actions).to(device)
    found = _run(policy, batch, inputs, recipe)
    mask = None if batch.mask is None else torch.from_numpy(batch.mask).to(device)
    prox_logp = policy.dist.log_prob(found.dist, actions, mask)
    values = policy.denormalize(found.values)
    advantages, targets = _advantages(batch, values, found.final_values, recipe)
    logp = torch.from_numpy(batch.logp).to(values)
    dist = torch.from_numpy(batch.dist).to(values)
    sums = logp + dist.sum(1) + prox_logp + found.dist.sum(1) + advantages + targets
    broken = ~torch.isfinite(sums).cpu().numpy() | ~np.isfinite(batch.rewards)
    chunks = burn_in = None
    if policy.is_recurrent:
        chunks = chunk_table(batch.lengths, recipe.max_seq_len)
        burn_in = np.minimum(chunks[:, 1], recipe.burn_in)
    return PreparedBatch(
        batch=batch,
        inputs=inputs,
        actions=actions,
        logp=logp,
        dist=dist,
        prox_logp=prox_logp,
        prox_dist=found.dist,
        mask=mask,
        values=values,
        advantages=advantages,
        targets=targets,
        chunks=chunks,
        chunk_states=_chunk_states(batch, chunks, burn_in, found, recipe),
        finite=np.bincount(batch.fragment_of_row[broken], minlength=len(batch.lengths)) == 0,
        burn_in=burn_in,
    )


@torch.no_grad()
def refresh(policy: Policy, prepared: PreparedBatch, recipe: Recipe, *, advantages: bool, states: bool) -> None:
    """Another pass, with the network as it is now: values, advantages and targets anew, or the chunks' states.

    The policy at the start of the update (`prox_...`) stays what it was.
    """
    batch = prepared.batch
    found = _run(policy, batch, prepared.inputs, recipe)
    if advantages:
        prepared.values = policy.denormalize(found.values)
        prepared.advantages, prepared.targets = _advantages(batch, prepared.values, found.final_values, recipe)
    if states:
        prepared.chunk_states = _chunk_states(batch, prepared.chunks, prepared.burn_in, found, recipe)


def first_non_finite(prepared: PreparedBatch, fragment: int) -> str:
    """Names the first quantity of a fragment that is not finite, in the order in which they are computed."""
    batch = prepared.batch
    start, length = int(batch.starts[fragment]), int(batch.lengths[fragment])
    if not all(np.isfinite(final[fragment]).all() for final in batch.final_obs.values()):
        return "observation after the last row"
    named = [(f"observation {leaf!r}" if leaf else "observation", obs) for leaf, obs in batch.obs.items()]
    named += [
        ("reward", batch.rewards),
        ("log-probability of the behaviour policy", batch.logp),
        ("distribution inputs of the behaviour policy", batch.dist),
        ("distribution inputs of the network", prepared.prox_dist.cpu().numpy()),
        ("log-probability under the network", prepared.prox_logp.cpu().numpy()),
        ("value of the network", prepared.values.cpu().numpy()),
    ]
    for name, array in named:
        broken = ~np.isfinite(array[start : start + length]).reshape(length, -1).all(1)
        if broken.any():
            row = int(np.argmax(broken))
            value = array[start + row]
            return f"{name} of row {row}" + (f" is {value}" if value.ndim == 0 else "")
    return "value target"


def _inputs(batch: SampleBatch, device: torch.device) -> Inputs:
    obs = {leaf: torch.from_numpy(array) for leaf, array in batch.obs.items()}
    if sum(t.nbytes for t in obs.values()) <= DEVICE_BYTES:
        obs = {leaf: t.to(device) for leaf, t in obs.items()}
    return Inputs(
        obs=obs,
        prev_action=torch.from_numpy(batch.prev_action).to(device),
        prev_reward=torch.from_numpy(batch.prev_reward).to(device),
        has_prev=torch.from_numpy(batch.has_prev).to(device),
        device=device,
    )


def _rows_per_forward(inputs: Inputs) -> int:
    row_bytes = sum(4 * t[:1].numel() for t in inputs.obs.values())
    return max(MIN_FORWARD_ROWS, FORWARD_BYTES // max(row_bytes, 1024))


def _run(policy: Policy, batch: SampleBatch, inputs: Inputs, recipe: Recipe) -> _Pass:
    """The pass over the batch, or over this learner's share of it."""
    reduction, device = recipe.reduction, recipe.device
    fragments = np.arange(len(batch.lengths))
    if reduction is not None:
        fragments = fragments[reduction.rank :: reduction.size]
    pieces = piece_states = final_state = None
    if policy.is_recurrent:
        pieces = pass_table(batch.lengths, recipe.max_seq_len, recipe.burn_in)
        own = pieces if reduction is None else pieces[np.isin(pieces[:, 0], fragments)]
        dist, values, piece_states, final_state = _recurrent_pass(policy, batch, inputs, pieces, own)
    else:
        rows = None if reduction is None else ranges(batch.starts[fragments], batch.lengths[fragments])
        dist, values = _plain_pass(policy, batch, inputs, rows)
    final_values = _final_values(policy, batch, final_state, fragments, values, device)
    if reduction is not None:
        # Every row is zero everywhere but at one learner.
        parts = [t for t in (dist, values, final_values, piece_states) if t is not None]
        flat = torch.cat([t.flatten() for t in parts])
        reduction.sum(flat)
        for part, summed in zip(parts, flat.split([t.numel() for t in parts]), strict=True):
            part.copy_(summed.view(part.shape))
    return _Pass(dist, values, final_values, pieces, piece_states)


def _plain_pass(policy: Policy, batch: SampleBatch, inputs: Inputs, rows: np.ndarray | None) -> tuple[Tensor, Tensor]:
    """-> dist [N, P], values [N] as the network gives them; zeros for rows that are not asked for (None: all are)."""
    step = _rows_per_forward(inputs)
    dists, values = [], []
    for start in range(0, len(batch) if rows is None else len(rows), step):
        some = slice(start, start + step)
        out = policy(*inputs.take(some if rows is None else rows[some]), None, None)
        dists.append(out.dist)
        values.append(out.values)
    if rows is None:
        return torch.cat(dists), torch.cat(values)
    like = next(policy.parameters())
    dist, value = like.new_zeros(len(batch), policy.dist.inputs_size), like.new_zeros(len(batch))
    if dists:
        there = torch.from_numpy(rows).to(like.device)
        dist[there], value[there] = torch.cat(dists), torch.cat(values)
    return dist, value


def _recurrent_pass(
    policy: Policy, batch: SampleBatch, inputs: Inputs, pieces: np.ndarray, own: np.ndarray
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dist [N, P], values [N], piece_states [K, S], state after each fragment's last row [F, S].

    Piece k of many fragments goes through in one forward; their states are handed on to piece k + 1. `own` are the
    pieces that do; what belongs to others is zero.
    """
    device = inputs.device
    state = torch.tensor(batch.state_in, device=device)  # a copy: it moves on, the batch stays
    number = np.searchsorted(pieces[:, 3], own[:, 3])
    piece_states: Tensor | None = None
    for ids in _chunk_groups(own, _rows_per_forward(inputs)):
        fragment, _, lengths, starts = own[ids].T
        where = torch.from_numpy(fragment).to(device)
        entering = state.index_select(0, where)
        rows = ranges(starts, lengths)
        out = policy(*inputs.take(rows), lengths.tolist(), entering)
        if piece_states is None:
            state = state.to(out.values.dtype)
            piece_states = state.new_zeros(len(pieces), policy.state_size)
            dist = out.dist.new_zeros(len(batch), policy.dist.inputs_size)
            values = out.values.new_zeros(len(batch))
        piece_states[torch.from_numpy(number[ids]).to(device)] = entering.to(state.dtype)
        rows_there = torch.from_numpy(rows).to(device)
        dist[rows_there] = out.dist
        values[rows_there] = out.values
        state[where] = out.state
    if piece_states is None:
        like = next(policy.parameters())
        return (
            like.new_zeros(len(batch), policy.dist.inputs_size),
            like.new_zeros(len(batch)),
            like.new_zeros(len(pieces), policy.state_size),
            state.to(like.dtype),
        )
    return dist, values, piece_states, state


def pass_table(lengths: np.ndarray, max_seq_len: int, burn_in: int) -> np.ndarray:
    """As `chunk_table`, cut also where the rows that warm a chunk up begin: a state is needed there."""
    chunks = chunk_table(lengths, max_seq_len)
    offset = burn_in % max_seq_len
    if offset == 0:
        return chunks
    later = chunks[chunks[:, 1] > 0]
    extra = later - np.array([0, offset, 0, offset])
    table = np.concatenate([chunks, extra])
    table = table[np.argsort(table[:, 3])]
    table[:, 2] = np.diff(table[:, 3], append=lengths.sum())
    return table


def _chunk_states(
    batch: SampleBatch, chunks: np.ndarray | None, burn_in: np.ndarray | None, found: _Pass, recipe: Recipe
) -> Tensor | None:
    """[C, S] state at the row where each chunk, or its burn-in, begins."""
    if chunks is None or burn_in is None or found.pieces is None or found.piece_states is None:
        return None
    first = chunks[:, 3] - burn_in
    piece = np.searchsorted(found.pieces[:, 3], first)
    states = found.piece_states[torch.from_numpy(piece).to(recipe.device)]
    if recipe.stored_states and batch.stored_states is not None and batch.stored_rows is not None:
        # The actor's states, where the fragments carry one.
        at = np.searchsorted(batch.stored_rows, first).clip(max=len(batch.stored_rows) - 1)
        known = batch.stored_rows[at] == first
        stored = torch.from_numpy(batch.stored_states[at[known]]).to(states)
        states[torch.from_numpy(known).to(recipe.device)] = stored
    return states


def _chunk_groups(chunks: np.ndarray, max_rows: int) -> Iterator[np.ndarray]:
    """Chunk indices that may share a forward: all first chunks, then all second ones, ..., in slices."""
    position, lengths = chunks[:, 1], chunks[:, 2]
    for at in np.unique(position):
        ids = np.flatnonzero(position == at)
        slot = (np.cumsum(lengths[ids]) - lengths[ids]) // max_rows
        yield from np.split(ids, np.flatnonzero(np.diff(slot)) + 1)


def _final_values(
    policy: Policy,
    batch: SampleBatch,
    final_state: Tensor | None,
    fragments: np.ndarray,
    like: Tensor,
    device: torch.device,
) -> Tensor:
    """[F] value of the observation after each of these fragments' last row, in reward units; 0 after termination."""
    result = like.new_zeros(len(batch.lengths))
    last = batch.starts + batch.lengths - 1
    open_ended = fragments[~batch.terminated[fragments]]
    ends = Inputs(
        obs={leaf: torch.from_numpy(array) for leaf, array in batch.final_obs.items()},
        prev_action=torch.from_numpy(batch.actions[last]).to(device),
        prev_reward=torch.from_numpy(batch.rewards[last]).to(device),
        has_prev=torch.ones(len(last), dtype=torch.bool, device=device),
        device=device,
    )
    step = _rows_per_forward(ends)
    for at in range(0, len(open_ended), step):
        some = open_ended[at : at + step]
        there = torch.from_numpy(some).to(device)
        if final_state is None:
            out = policy(*ends.take(some), None, None)
        else:
            out = policy(*ends.take(some), [1] * len(some), final_state[there])
        result[there] = policy.denormalize(out.values)
    return result


def _advantages(batch: SampleBatch, values: Tensor, final_values: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """-> advantages [N], targets [N]. On the host: the recursion is many tiny operations."""
    t, b = batch.position_in_fragment, batch.fragment_of_row
    shape = (int(batch.lengths.max()), len(batch.lengths))
    v = values.cpu().numpy()
    rewards = batch.rewards.astype(v.dtype, copy=False)
    if recipe.reward_scale != 1.0:
        rewards = rewards * v.dtype.type(recipe.reward_scale)
    if recipe.reward_clip is not None:
        rewards = rewards.clip(-recipe.reward_clip, recipe.reward_clip)
    last = np.zeros(len(batch), dtype=bool)
    last[batch.starts + batch.lengths - 1] = True
    next_v = np.append(v[1:], v.dtype.type(0.0))
    next_v[last] = final_values.cpu().numpy()

    def padded(rows: np.ndarray) -> Tensor:
        full = np.zeros(shape, dtype=rows.dtype)
        full[t, b] = rows
        return torch.from_numpy(full)

    terminated = last & batch.terminated[b]
    advantages, targets = gae(
        padded(rewards),
        padded(v),
        padded(next_v),
        padded(terminated),
        padded(last),
        recipe.gamma,
        recipe.lam,
        mask=padded(np.ones(len(batch), dtype=bool)),
    )
    rows = torch.from_numpy(t), torch.from_numpy(b)
    return advantages[rows].to(values), targets[rows].to(values)
