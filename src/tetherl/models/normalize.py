"""Running statistics of observations, as part of the policy: they travel, are saved and are frozen with its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tetherl.ops.normalize import VARIANCE_FLOOR, RunningMoments
from tetherl.spaces import Leaf

OBSERVATION_CLIP = 10.0


def normalized_leaves(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Vectors of numbers. Images keep their own scale; names (Discrete) and bits have none."""
    return [leaf for leaf in leaves if leaf.kind == "box"]


class ObservationNormalizer(nn.Module):
    """(x - mean) / std of each element of the vector leaves, clipped to ±10; other leaves pass as they are.

    Nothing moves the statistics but `merge`: within a policy version every forward pass, acting or learning, uses the
    same ones. Until the first merge they are 0 and 1. Buffers are float64: nothing is lost on the way.
    """

    count: Tensor

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        super().__init__()
        self._shapes = {leaf.name: leaf.shape for leaf in normalized_leaves(leaves)}
        self.register_buffer("count", torch.tensor(0.0, dtype=torch.float64))
        for i, shape in enumerate(self._shapes.values()):
            self.register_buffer(f"mean_{i}", torch.zeros(shape, dtype=torch.float64))
            self.register_buffer(f"variance_{i}", torch.ones(shape, dtype=torch.float64))

    def forward(self, obs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """{leaf: [N, *leaf]} -> the same, normalised leaves in `dtype`."""
        normalized = dict(obs)
        for i, name in enumerate(self._shapes):
            mean, variance = self._statistics(i)
            centred = obs[name].to(mean.dtype) - mean
            clipped = (centred / variance.clamp(min=VARIANCE_FLOOR).sqrt()).clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)
            normalized[name] = clipped.to(dtype)
        return normalized

    def takes(self, name: str) -> bool:
        """Whether the leaf is one of the normalised ones."""
        return name in self._shapes

    def moments(self, obs: Mapping[str, Tensor]) -> dict[str, RunningMoments]:
        """Moments of N raw observations, {leaf: [N, *leaf]}: what `merge` takes, and what several learners can sum."""
        found = {}
        for name, shape in self._shapes.items():
            found[name] = RunningMoments(tuple(shape))
            found[name].update(obs[name])
        return found

    def merge(self, seen: Mapping[str, RunningMoments]) -> None:
        """Take the moments of what was seen into the statistics; the first ones replace 0 and 1."""
        count = float(self.count)
        for i, name in enumerate(self._shapes):
            mean, variance = self._statistics(i)
            total = RunningMoments(tuple(mean.shape))
            total.count, total.mean, total.m2 = count, mean.cpu(), variance.cpu() * count
            total.merge(seen[name])
            if total.count:
                mean.copy_(total.mean)
                variance.copy_(total.variance)
            self.count.fill_(total.count)

    def _statistics(self, index: int) -> tuple[Tensor, Tensor]:
        return getattr(self, f"mean_{index}"), getattr(self, f"variance_{index}")
