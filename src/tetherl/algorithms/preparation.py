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


@dataclass(slots=True)
class PreparedBatch:
    """A batch with all that the epochs need. N rows, F fragments, C chunks; tensors are on the device.

    values, next_values, advantages and targets are in reward units (not normalised). chunks is the table of
    `chunk_table` and chunk_states [C, S] the state at each chunk's first row; both None without recurrence.
    finite [F]: every number of the fragment that the loss would use is finite.
    """

    batch: SampleBatch
    inputs: Inputs
    actions: Tensor  # [N, A]
    logp: Tensor  # [N] behaviour
    dist: Tensor  # [N, P] behaviour
    prox_logp: Tensor  # [N]
    prox_dist: Tensor  # [N, P]
    values: Tensor  # [N]
    advantages: Tensor  # [N]
    targets: Tensor  # [N]
    chunks: np.ndarray | None
    chunk_states: Tensor | None
    finite: np.ndarray


@torch.no_grad()
def prepare(
    policy: Policy, batch: SampleBatch, *, gamma: float, lam: float, max_seq_len: int, device: torch.device
) -> PreparedBatch:
    """Run the pass over `batch` and compute advantages and value targets."""
    inputs = _inputs(batch, device)
    actions = torch.from_numpy(batch.actions).to(device)
    chunks = chunk_table(batch.lengths, max_seq_len) if policy.is_recurrent else None
    if chunks is None:
        prox_dist, values = _plain_pass(policy, batch, inputs)
        chunk_states = final_state = None
    else:
        prox_dist, values, chunk_states, final_state = _recurrent_pass(policy, batch, inputs, chunks)
    final_values = _final_values(policy, batch, final_state, device)
    prox_logp = policy.dist.log_prob(prox_dist, actions)
    values = policy.denormalize(values)
    advantages, targets = _advantages(batch, values, final_values, gamma, lam)
    logp = torch.from_numpy(batch.logp).to(device)
    dist = torch.from_numpy(batch.dist).to(device)
    sums = logp + dist.sum(1) + prox_logp + prox_dist.sum(1) + advantages + targets
    broken = ~torch.isfinite(sums).cpu().numpy()
    return PreparedBatch(
        batch=batch,
        inputs=inputs,
        actions=actions,
        logp=logp,
        dist=dist,
        prox_logp=prox_logp,
        prox_dist=prox_dist,
        values=values,
        advantages=advantages,
        targets=targets,
        chunks=chunks,
        chunk_states=chunk_states,
        finite=np.bincount(batch.fragment_of_row[broken], minlength=len(batch.lengths)) == 0,
    )


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


def _plain_pass(policy: Policy, batch: SampleBatch, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """-> prox_dist [N, P], values [N] as the network gives them."""
    step = _rows_per_forward(inputs)
    dists, values = [], []
    for start in range(0, len(batch), step):
        out = policy(*inputs.take(slice(start, start + step)), None, None)
        dists.append(out.dist)
        values.append(out.values)
    return torch.cat(dists), torch.cat(values)


def _recurrent_pass(
    policy: Policy, batch: SampleBatch, inputs: Inputs, chunks: np.ndarray
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> prox_dist [N, P], values [N], chunk_states [C, S], state after each fragment's last row [F, S].

    Chunk k of many fragments goes through in one forward; their states are handed on to chunk k + 1.
    """
    device = inputs.device
    state = torch.from_numpy(batch.state_in).to(device)
    chunk_states = state.new_empty(len(chunks), policy.state_size)
    prox_dist = state.new_empty(len(batch), policy.dist.inputs_size)
    values = state.new_empty(len(batch))
    for ids in _chunk_groups(chunks, _rows_per_forward(inputs)):
        fragment, _, lengths, starts = chunks[ids].T
        where = torch.from_numpy(fragment).to(device)
        entering = state.index_select(0, where)
        chunk_states[torch.from_numpy(ids).to(device)] = entering
        rows = ranges(starts, lengths)
        out = policy(*inputs.take(rows), lengths.tolist(), entering)
        rows_there = torch.from_numpy(rows).to(device)
        prox_dist[rows_there] = out.dist
        values[rows_there] = out.values
        state[where] = out.state
    return prox_dist, values, chunk_states, state


def _chunk_groups(chunks: np.ndarray, max_rows: int) -> Iterator[np.ndarray]:
    """Chunk indices that may share a forward: all first chunks, then all second ones, ..., in slices."""
    position, lengths = chunks[:, 1], chunks[:, 2]
    for at in np.unique(position):
        ids = np.flatnonzero(position == at)
        slot = (np.cumsum(lengths[ids]) - lengths[ids]) // max_rows
        yield from np.split(ids, np.flatnonzero(np.diff(slot)) + 1)


def _final_values(policy: Policy, batch: SampleBatch, final_state: Tensor | None, device: torch.device) -> np.ndarray:
    """[F] value of the observation after each fragment's last row, in reward units; 0 after termination."""
    result = np.zeros(len(batch.lengths), dtype=np.float32)
    last = batch.starts + batch.lengths - 1
    open_ended = np.flatnonzero(~batch.terminated)
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
        if final_state is None:
            out = policy(*ends.take(some), None, None)
        else:
            state = final_state[torch.from_numpy(some).to(device)]
            out = policy(*ends.take(some), [1] * len(some), state)
        result[some] = policy.denormalize(out.values).float().cpu().numpy()
    return result


def _advantages(
    batch: SampleBatch, values: Tensor, final_values: np.ndarray, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """-> advantages [N], targets [N]. On the host: the recursion is many tiny operations."""
    t, b = batch.position_in_fragment, batch.fragment_of_row
    shape = (int(batch.lengths.max()), len(batch.lengths))
    v = values.cpu().numpy()
    last = np.zeros(len(batch), dtype=bool)
    last[batch.starts + batch.lengths - 1] = True
    next_v = np.append(v[1:], np.float32(0.0))
    next_v[last] = final_values

    def padded(rows: np.ndarray) -> Tensor:
        full = np.zeros(shape, dtype=rows.dtype)
        full[t, b] = rows
        return torch.from_numpy(full)

    terminated = last & batch.terminated[b]
    advantages, targets = gae(
        padded(batch.rewards),
        padded(v),
        padded(next_v),
        padded(terminated),
        padded(last),
        gamma,
        lam,
        mask=padded(np.ones(len(batch), dtype=bool)),
    )
    rows = torch.from_numpy(t), torch.from_numpy(b)
    return advantages[rows].to(values), targets[rows].to(values)
