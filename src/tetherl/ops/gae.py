"""Advantage estimates."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    lam: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates, Schulman et al. 2016 (arXiv:1506.02438), and value targets.

    All tensors are time-major [T, B]. next_values[t] is the value of the observation that followed row t,
    before any reset. Two flags, never one: `terminated` zeroes the bootstrap, `done` (terminated, truncated
    or the last row of a fragment; the tensor's last row always counts) stops the recursion. mask is False for
    padding after the last row: its content, NaN included, has no effect; advantage and target are 0 there.

        δ[t] = r[t] + γ·(0 if terminated[t] else next_values[t]) - V[t]
        A[t] = δ[t] + γ·λ·(0 if done[t] else A[t+1])        target[t] = A[t] + V[t]

    Returns (advantages [T, B], targets [T, B]), without gradients.
    """
    given = {
        "rewards": rewards,
        "next_values": next_values,
        "terminated": terminated,
        "done": done,
        "mask": mask,
    }
    for name, x in given.items():
        if values.ndim != 2 or (x is not None and x.shape != values.shape):
            shape = None if x is None else list(x.shape)
            raise ValueError(f"gae needs tensors [T, B]: {name} has shape {shape}, values {list(values.shape)}")
    terminated, done = terminated.bool(), done.bool()
    deltas = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    decay = torch.full_like(deltas, gamma * lam).masked_fill(done | terminated, 0.0)
    if mask is not None:
        padding = ~mask.bool()
        deltas = deltas.masked_fill(padding, 0.0)
        decay = decay.masked_fill(padding, 0.0)
    advantages = torch.empty_like(deltas)
    carried = deltas.new_zeros(deltas.shape[1])
    for t in range(len(deltas) - 1, -1, -1):
        carried = torch.addcmul(deltas[t], decay[t], carried, out=advantages[t])
    targets = advantages + values
    return advantages, targets if mask is None else targets.masked_fill(padding, 0.0)
