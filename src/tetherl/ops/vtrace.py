"""Off-policy corrected value targets and advantages: V-trace."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tetherl.ops.losses import LOG_RATIO_LIMIT


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    lam: float = 1.0,
    *,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace of Espeholt et al. 2018 (arXiv:1802.01561) with λ: value targets and policy-gradient advantages.

    log_rhos is log π(a|x) - log μ(a|x), taken as ±20 beyond that; π is the policy that is corrected for, μ the one
    that acted. Tensors are time-major [T, B] and mean what they mean in `ops.gae.gae`: next_values[t] is the value
    after row t before any reset, `terminated` zeroes the bootstrap, `done` (or the last row) stops the recursion,
    mask is False for padding (its content, NaN included, has no effect; 0 comes out). The bars cap the ratios;
    None: no cap.

        ρ = min(ρ̄, π/μ)    c = λ·min(c̄, π/μ)    ρ_pg = min(ρ̄_pg, π/μ)
        δ[t]   = ρ[t]·(r[t] + γ·boot[t] - V[t])            boot[t] = 0 if terminated[t] else next_values[t]
        acc[t] = δ[t] + γ·c[t]·(0 if done[t] else acc[t+1])
        vs[t]  = V[t] + acc[t]
        pg[t]  = ρ_pg[t]·(r[t] + γ·next[t] - V[t])         next[t] = boot[t] + λ·(0 if done[t] else acc[t+1])

    The next value is the mixture λ·vs[t+1] + (1-λ)·V[t+1], which makes pg on-policy the estimate of GAE(λ).
    The mean of pg is not 0 for good reasons: divide it by its deviation if you like, never subtract the mean.

    Returns (vs [T, B], pg [T, B]), without gradients. ValueError for shapes that differ, or ρ̄ < c̄.
    """
    given = {
        "log_rhos": log_rhos,
        "rewards": rewards,
        "next_values": next_values,
        "terminated": terminated,
        "done": done,
        "mask": mask,
    }
    for name, x in given.items():
        if values.ndim != 2 or (x is not None and x.shape != values.shape):
            shape = None if x is None else list(x.shape)
            raise ValueError(f"vtrace needs tensors [T, B]: {name} has shape {shape}, values {list(values.shape)}")
    caps = [math.inf if bar is None else bar for bar in (rho_bar, c_bar, pg_rho_bar)]
    if caps[0] < caps[1]:
        raise ValueError(f"rho_bar must not be below c_bar, got {rho_bar} and {c_bar}")
    if mask is not None:
        padding = ~mask.bool()
        log_rhos, rewards, values, next_values = (  # all that is computed from these is 0 then
            x.masked_fill(padding, 0.0) for x in (log_rhos, rewards, values, next_values)
        )
    terminated = terminated.bool()
    over = done.bool() | terminated
    rhos = log_rhos.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    rho, c, rho_pg = (rhos.clamp(max=cap) for cap in caps)
    one_step = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    deltas, decay = rho * one_step, gamma * lam * c
    after = torch.zeros_like(deltas)  # acc[t+1]; 0 beyond the end of an episode and in padding
    carried = deltas.new_zeros(deltas.shape[1])
    for t in range(len(deltas) - 1, -1, -1):
        after[t] = carried.masked_fill(over[t], 0.0)
        carried = torch.addcmul(deltas[t], decay[t], after[t])
    return values + deltas + decay * after, rho_pg * (one_step + gamma * lam * after)
