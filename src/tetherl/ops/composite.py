"""Several independent distributions as one: Dict and Tuple actions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tetherl.ops.distributions import Distribution


class Composite(Distribution):
    """Independent parts side by side: inputs [N, P] and actions [N, A] are those of the parts, concatenated in order.

    log_prob, entropy and kl are sums over the parts. An action row is one row of floats: ids and bits of discrete
    parts are whole numbers in it (float32 is exact up to 2^24). There are no masks: `mask` must be None.
    """

    action_dtype = torch.float32

    def __init__(self, parts: Sequence[Distribution]) -> None:
        if not parts:
            raise ValueError("needs at least one part")
        self.parts = tuple(parts)
        self._inputs_sizes = [part.inputs_size for part in self.parts]
        self._widths = [part.action_width for part in self.parts]
        self.inputs_size, self.action_width = sum(self._inputs_sizes), sum(self._widths)

    def sample(self, inputs: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        return self._join(inputs, [part.sample(x, generator) for part, x in self._split(inputs, mask)])

    def mode(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._join(inputs, [part.mode(x) for part, x in self._split(inputs, mask)])

    def log_prob(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        own = self._actions(inputs, actions)
        return _total([part.log_prob(x, a) for (part, x), a in zip(self._split(inputs, mask), own, strict=True)])

    def entropy(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return _total([part.entropy(x) for part, x in self._split(inputs, mask)])

    def sampled_entropy(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        own = self._actions(inputs, actions)
        return _total([part.sampled_entropy(x, a) for (part, x), a in zip(self._split(inputs, mask), own, strict=True)])

    def kl(self, p_inputs: Tensor, q_inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        p, q = self._split(p_inputs, mask), self._split(q_inputs, mask)
        return _total([part.kl(x, y) for (part, x), (_, y) in zip(p, q, strict=True)])

    def _split(self, inputs: Tensor, mask: Tensor | None) -> list[tuple[Distribution, Tensor]]:
        self._check(inputs)
        if mask is not None:
            raise ValueError("actions of several parts have no mask")
        return list(zip(self.parts, inputs.split(self._inputs_sizes, -1), strict=True))

    def _actions(self, inputs: Tensor, actions: Tensor) -> list[Tensor]:
        self._check(inputs, actions)
        columns = actions.split(self._widths, -1)
        return [
            own.to(inputs.dtype) if part.action_dtype.is_floating_point else own.long()
            for part, own in zip(self.parts, columns, strict=True)
        ]

    @staticmethod
    def _join(inputs: Tensor, actions: list[Tensor]) -> Tensor:
        return torch.cat([own.to(inputs.dtype) for own in actions], -1)


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)
