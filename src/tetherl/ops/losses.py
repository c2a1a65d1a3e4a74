"""Terms of the policy-gradient losses, row by row, and numbers that describe an update.

Rows are valid env steps: padding and dropped rows are taken out before, because NaN times 0 is NaN. All
tensors are [N] unless stated, of equal shape (checked: [N] against [N, 1] would broadcast to [N, N]).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
KL_COEFF_MIN, KL_COEFF_MAX = 1e-4, 100.0


def log_ratio(logp_new: Tensor, logp_old: Tensor) -> Tensor:
    """log(new/old), clamped to ±20 so that its exponential stays finite."""
    _same_shape(logp_new=logp_new, logp_old=logp_old)
    return (logp_new - logp_old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_policy_loss(
    logp_new: Tensor,
    logp_centre: Tensor,
    advantages: Tensor,
    clip: float | Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """The clipped surrogate of PPO (arXiv:1707.06347) as a loss per row: -w·min(q·A, clip(q, 1-ε, 1+ε)·A).

    q = exp(logp_new - logp_centre). The centre is the policy that chose the action (PPO) or another anchor,
    with weights correcting for the difference (decoupled PPO). clip: ε, a number or one per row. Gradients
    flow through logp_new only.
    """
    _same_shape(logp_new=logp_new, logp_centre=logp_centre, advantages=advantages, clip=clip, weights=weights)
    ratio = log_ratio(logp_new, logp_centre.detach()).exp()
    advantages = advantages.detach()
    eps = clip if isinstance(clip, Tensor) else ratio.new_tensor(clip)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -surrogate if weights is None else -surrogate * weights.detach()


def outside_clip(logp_new: Tensor, logp_centre: Tensor, clip: float | Tensor) -> Tensor:
    """Rows whose ratio lies outside 1±ε, bool; the mean is the clip fraction."""
    return (log_ratio(logp_new, logp_centre).exp() - 1).abs() > clip


def lag_scaled_clip(eps: float, lag: Tensor, kappa: float, eps_max: float) -> Tensor:
    """ε per row, growing with the row's lag in policy versions: min(ε·(1 + κ·lag), ε_max), floating point."""
    lag = lag if lag.is_floating_point() else lag.to(torch.get_default_dtype())
    return (eps * (1 + kappa * lag)).clamp(max=eps_max)


def target_centre(logp_target: Tensor, logp_behaviour: Tensor, cap: float = 2.0) -> Tensor:
    """The `logp_centre` of APPO's loss, Luo et al. 2019 (arXiv:1912.00167): with it the ratio of
    `clipped_policy_loss` is min(μ/π_target, cap)·π/μ, that is π/π_target until the cap acts."""
    _same_shape(logp_target=logp_target, logp_behaviour=logp_behaviour)
    return torch.maximum(logp_target, logp_behaviour - math.log(cap)).detach()


def value_loss(
    values: Tensor,
    targets: Tensor,
    old_values: Tensor | None = None,
    *,
    vf_clip: Literal["none", "clamped_error", "clipped_value"] = "none",
    clip: float = 10.0,
) -> Tensor:
    """Squared error per row, without ½. Gradients flow through values only.

    vf_clip, three things that go by the name of value clipping:
    "none": the error as it is. "clamped_error" (RLlib): squared errors count as `clip` at most, and have no gradient
    beyond. "clipped_value" (PPO2): the larger one of the errors of the value and of the value kept within ±clip of
    `old_values`, the value at the start of the update.
    """
    _same_shape(values=values, targets=targets, old_values=old_values)
    errors = (values - targets.detach()).square()
    if vf_clip == "none":
        return errors
    if vf_clip == "clamped_error":
        return errors.clamp(max=clip)
    if old_values is None:
        raise ValueError("vf_clip 'clipped_value' needs old_values")
    near = clip_around(values, old_values, clip)
    return torch.maximum(errors, (near - targets.detach()).square())


def clip_around(values: Tensor, old_values: Tensor, clip: float) -> Tensor:
    """values, kept within ±clip of old_values."""
    old = old_values.detach()
    return old + (values - old).clamp(-clip, clip)


def adapt_kl_coeff(beta: float, kl: float, target: float) -> float:
    """β for the next iteration: ×1.5 where kl > 2·target, ×0.5 where kl < target/2, kept within [1e-4, 100].

    A non-finite kl changes nothing; β = 0 (the term is off) stays 0.
    """
    if beta == 0 or not math.isfinite(kl):
        return beta
    if kl > 2.0 * target:
        beta *= 1.5
    elif kl < 0.5 * target:
        beta *= 0.5
    return min(max(beta, KL_COEFF_MIN), KL_COEFF_MAX)


def masked_mean(values: Tensor, mask: Tensor | None = None, count: float | Tensor | None = None) -> Tensor:
    """Sum over valid rows / number of valid rows, a scalar; 0 when there is none. Other rows are not read.

    count: divide by this number instead, for a share of a larger batch whose shares are added up.
    """
    if mask is not None:
        _same_shape(values=values, mask=mask)
        values = values[mask.bool()]
    if count is None:
        count = max(values.numel(), 1)
    return values.sum() / count


def explained_variance(predictions: Tensor, targets: Tensor) -> float:
    """1 - Var(targets - predictions) / Var(targets); NaN when the targets do not vary."""
    _same_shape(predictions=predictions, targets=targets)
    spread = targets.double().var(correction=0) if targets.numel() else torch.tensor(0.0)
    if spread == 0:
        return math.nan
    return float(1 - (targets.double() - predictions.double()).var(correction=0) / spread)


def kl_k1(log_ratios: Tensor) -> Tensor:
    """Estimate of KL(old‖new) per row from log(new/old) at actions of the old policy: unbiased, any sign."""
    return -log_ratios


def kl_k2(log_ratios: Tensor) -> Tensor:
    """As `kl_k1`: biased, small variance."""
    return 0.5 * log_ratios.square()


def kl_k3(log_ratios: Tensor) -> Tensor:
    """As `kl_k1`: unbiased and never negative."""
    return torch.expm1(log_ratios) - log_ratios


def effective_sample_size(weights: Tensor) -> float:
    """(Σw)² / (n·Σw²): 1 when all weights are equal, 1/n when one has it all; NaN without any weight."""
    weights = weights.double()
    return float(weights.sum().square() / (weights.numel() * weights.square().sum()))


def _same_shape(**tensors: Tensor | float | None) -> None:
    shapes = {name: list(x.shape) for name, x in tensors.items() if isinstance(x, Tensor)}
    if len({tuple(s) for s in shapes.values()}) > 1:
        raise ValueError(f"shapes must be equal, got {shapes}")
