"""Running moments, return scaling and advantage normalisation, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-8
STD_TOO_SMALL = 1e-6


class RunningMoments:
    """Count, mean and sum of squared deviations (M2) of everything seen, elementwise over `shape`, float64.

    Merging the moments of several workers gives what one pass over all their data gives (Chan et al. 1979).
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.count = 0.0
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.m2 = torch.zeros(shape, dtype=torch.float64)

    def update(self, values: Tensor) -> None:
        """Adds N values, [N, *shape]. ValueError for another shape."""
        if values.ndim != self.mean.ndim + 1 or values.shape[1:] != self.mean.shape:
            raise ValueError(f"needs values [N, {list(self.mean.shape)}], got {list(values.shape)}")
        if len(values) == 0:
            return
        batch = RunningMoments()
        x = values.detach().to("cpu", torch.float64)
        batch.count, batch.mean = float(len(x)), x.mean(0)
        batch.m2 = (x - batch.mean).square().sum(0)
        self.merge(batch)

    def merge(self, other: RunningMoments) -> None:
        """Adds what `other` has seen; `other` stays as it is."""
        if other.mean.shape != self.mean.shape:
            raise ValueError(f"cannot merge shapes {list(other.mean.shape)} and {list(self.mean.shape)}")
        if other.count == 0:
            return
        total = self.count + other.count
        delta = other.mean - self.mean
        self.mean = self.mean + delta * (other.count / total)
        self.m2 = self.m2 + other.m2 + delta.square() * (self.count * other.count / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """Population variance; 1 before the first value."""
        return self.m2 / self.count if self.count else torch.ones_like(self.m2)

    @property
    def std(self) -> Tensor:
        """Root of the variance, which is not taken below 1e-8: safe to divide by."""
        return self.variance.clamp(min=VARIANCE_FLOOR).sqrt()


class ReturnScaler:
    """Scales rewards by the deviation of their running discounted sum, G ← γ·G + r, one sum per environment.

    No mean is subtracted, which would change the task. gamma should be the algorithm's. `moments` are those of the
    sums; their order does not matter, but that of the rewards within one sum does.
    """

    def __init__(self, gamma: float, *, clip: float = 10.0) -> None:
        self.gamma, self.clip = gamma, clip
        self.moments = RunningMoments()

    def update(self, rewards: Tensor, done: Tensor, start: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Takes rewards and ends (terminated or truncated) of B streams, [T, B]; returns the sums, [T, B] float64.

        start: [B] the sums before the first rows; zeros if not given. A sum starts again at 0 after an end. mask:
        [T, B] False where a row is padding (at the end of a stream): it counts for nothing. Rows that are no steps
        (resets) must be left out.
        """
        shapes = {tuple(t.shape) for t in (rewards, done, mask) if t is not None}
        if rewards.ndim != 2 or len(shapes) != 1 or (start is not None and start.shape != rewards.shape[1:]):
            raise ValueError(
                f"needs rewards, done and mask [T, B] and start [B], got {sorted(shapes)}"
                + (f" and {list(start.shape)}" if start is not None else "")
            )
        rows = torch.empty(rewards.shape, dtype=torch.float64)
        sums = torch.zeros(rewards.shape[1], dtype=torch.float64) if start is None else start.double()
        for t, (reward, over) in enumerate(zip(rewards.to("cpu", torch.float64), done.cpu().bool(), strict=True)):
            rows[t] = sums * self.gamma + reward
            sums = rows[t].masked_fill(over, 0.0)
        self.moments.update(rows.reshape(-1) if mask is None else rows[mask])
        return rows

    def scale(self, rewards: Tensor) -> Tensor:
        """rewards (any shape) / deviation, clipped to ±clip. One constant scale until the next `update`."""
        return (rewards / self.deviation).clamp(-self.clip, self.clip)

    @property
    def deviation(self) -> float:
        """Root of the sums' variance plus 1e-8: safe to divide by."""
        return float((self.moments.variance + VARIANCE_FLOOR).sqrt())


def normalize_advantages(advantages: Tensor, eps: float = 1e-8, moments: RunningMoments | None = None) -> Tensor:
    """(A - mean) / (std + eps) with the population std, over valid rows only: advantages is [N], no padding.

    moments: of the whole batch, when this is only a share of it (see RunningMoments.merge). With fewer than
    two rows, or a std below 1e-6, only the mean is subtracted. Keeps the dtype.
    """
    if advantages.ndim != 1:
        raise ValueError(f"needs advantages of valid rows, [N], got {list(advantages.shape)}")
    if moments is None:
        moments = RunningMoments()
        moments.update(advantages)
    std = float(moments.variance.sqrt())
    centred = advantages - float(moments.mean)
    return centred if moments.count < 2 or std < STD_TOO_SMALL else centred / (std + eps)
