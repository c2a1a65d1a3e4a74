"""Aggregates over runs that a few lucky or failed runs do not dominate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def iqm(scores: Tensor) -> Tensor:
    """Interquartile mean over the last axis: [..., N] -> [...], float64. Agarwal et al. 2021 (arXiv:2108.13264).

    The mean of what is left when a quarter of the values (rounded down) is cut off at each end.
    """
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise ValueError(f"needs scores [..., N] with N at least 1, got {list(scores.shape)}")
    ordered = scores.double().sort(-1).values
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def iqm_interval(
    tasks: Sequence[Tensor], *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """IQM of the scores of all tasks together, and a stratified bootstrap interval (percentiles) around it.

    tasks: for each task the scores [n] of its runs (normalised, if tasks have different scales). Runs are drawn
    anew within each task, so every resample has as many runs of a task as there are.

    Returns (iqm, lower end, upper end). The same seed gives the same interval.
    """
    runs = [scores.double() for scores in tasks]
    if not runs or any(scores.ndim != 1 or len(scores) == 0 for scores in runs):
        raise ValueError(f"needs one [n] tensor of scores per task, got {[list(s.shape) for s in runs]}")
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(f"needs 0 < confidence < 1 and resamples >= 1, got {confidence} and {resamples}")
    generator = torch.Generator().manual_seed(seed)
    drawn = [scores[torch.randint(len(scores), (resamples, len(scores)), generator=generator)] for scores in runs]
    tail = (1 - confidence) / 2
    ends = torch.quantile(iqm(torch.cat(drawn, -1)), torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return float(iqm(torch.cat(runs))), float(ends[0]), float(ends[1])
