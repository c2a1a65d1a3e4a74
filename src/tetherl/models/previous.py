"""The previous action and reward as network input: what the agent just did, and what it got for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tetherl.models.encoders import OneHot
from tetherl.spaces import ActionCodec, ActionPart

REWARD_CLIP = 10.0


class PreviousInputs(nn.Module):
    """[N, A] actions, [N] rewards, [N] has_prev bits -> [N, width]; all zero at an episode's first step.

    Discrete parts are one-hot. MultiBinary and Box are numbers, and then there is one bit more in all, `has_prev`:
    zeros mean something there. Box actions enter as the environment executed them: clipped to the bounds (or squashed),
    in the learned scale ([-1, 1] between finite bounds). Dict and Tuple actions: part after part. Rewards are raw,
    clipped to ±10.
    """

    def __init__(self, actions: ActionCodec, use_action: bool, use_reward: bool) -> None:
        super().__init__()
        self.use_reward = use_reward
        self.parts = nn.ModuleList([_Part(part) for part in actions.parts] if use_action else [])
        self.has_bit = any(part.one_hot is None for part in self._parts())
        self.width = sum(part.width for part in self._parts()) + int(self.has_bit) + int(use_reward)

    def forward(self, action: Tensor, reward: Tensor, has_prev: Tensor, dtype: torch.dtype) -> Tensor:
        has_prev = has_prev.unsqueeze(1)
        # where, not a product: rows without a predecessor may hold anything, NaN included.
        inputs = [torch.where(has_prev, part(action, dtype), 0.0) for part in self._parts()]
        if self.has_bit:
            inputs.append(has_prev.to(dtype))
        if self.use_reward:
            clipped = reward.to(dtype).clamp(-REWARD_CLIP, REWARD_CLIP)
            inputs.append(torch.where(has_prev, clipped.unsqueeze(1), 0.0))
        return inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)

    def _parts(self) -> list[_Part]:
        return list(self.parts)  # type: ignore[arg-type]


class _Part(nn.Module):
    """[N, A] whole action rows -> [N, width] of one part."""

    low: Tensor
    high: Tensor

    def __init__(self, part: ActionPart) -> None:
        super().__init__()
        self.columns, self.kind, self.squash = part.columns, part.kind, part.squash
        self.one_hot = OneHot(part.nvec) if part.nvec is not None else None
        self.width = part.width if self.one_hot is None else self.one_hot.width
        if part.kind == "box":
            for name, bound, learned in (("low", part.low, -1.0), ("high", part.high, 1.0)):
                edge = torch.tensor(np.where(part.scaled, learned, bound))
                self.register_buffer(name, edge, persistent=False)

    def forward(self, action: Tensor, dtype: torch.dtype) -> Tensor:
        own = action[:, self.columns]
        if self.one_hot is not None:
            encoded: Tensor = self.one_hot(own.long())
            return encoded.to(dtype)
        row = own.to(dtype)
        if self.kind != "box":
            return row
        return torch.tanh(row) if self.squash else row.clamp(self.low.to(dtype), self.high.to(dtype))
