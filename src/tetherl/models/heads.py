"""From an action space to its distribution, and from the head's outputs to the distribution's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tetherl.ops.composite import Composite
from tetherl.ops.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
)
from tetherl.spaces import ActionCodec, ActionPart


def distribution_of(actions: ActionCodec) -> Distribution:
    """The distribution over rows of these actions; for a Dict or Tuple, that of its parts in order."""
    if actions.kind != "parts":
        return _distribution(actions.parts[0])
    return Composite([_distribution(part) for part in actions.parts])


def _distribution(part: ActionPart) -> Distribution:
    if part.nvec is not None:
        return Categorical(part.nvec[0]) if part.kind == "discrete" else MultiCategorical(part.nvec)
    if part.kind == "multibinary":
        return Bernoulli(part.width)
    return SquashedGaussian(part.low.tolist(), part.high.tolist()) if part.squash else DiagGaussian(part.width)


def distribution_order(actions: ActionCodec) -> Tensor | None:
    """Where each distribution input is in [the head's outputs, all log standard deviations]; None: in that order.

    Log standard deviations are parameters, not outputs; with several parts they belong between the outputs.
    """
    if actions.kind != "parts":
        return None
    sizes = [part.width if part.kind == "box" else part.inputs_size for part in actions.parts]
    order: list[int] = []
    output, deviation = 0, sum(sizes)
    for part, size in zip(actions.parts, sizes, strict=True):
        order += range(output, output + size)
        output += size
        if part.kind == "box":
            order += range(deviation, deviation + part.width)
            deviation += part.width
    return torch.tensor(order)
