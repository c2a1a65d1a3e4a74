"""The previous action and reward as network input: what the agent just did, and what it got for it."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from tetherl.models.encoders import OneHot
from tetherl.spaces import ActionCodec

REWARD_CLIP = 10.0


class PreviousInputs(nn.Module):
    """[N, A] actions, [N] rewards, [N] has_prev bits -> [N, width]; all zero at an episode's first step.

    Discrete parts are one-hot. MultiBinary and Box get one bit more, `has_prev`: zeros mean something there.
    Box actions enter as the environment executed them: clipped to the bounds, in the learned scale ([-1, 1]
    between finite bounds). Rewards are raw, clipped to ±10.
    """

    low: Tensor
    high: Tensor

    def __init__(self, actions: ActionCodec, use_action: bool, use_reward: bool) -> None:
        super().__init__()
        self.use_action, self.use_reward = use_action, use_reward
        self.one_hot: OneHot | None = None
        self.clips = False
        self.width = int(use_reward)
        if not use_action:
            return
        if actions.nvec is not None:
            self.one_hot = OneHot(actions.nvec)
            self.width += self.one_hot.width
        else:
            self.width += actions.width + 1
        if isinstance(actions.space, Box):
            low, high = (b.astype(np.float64).reshape(-1) for b in (actions.space.low, actions.space.high))
            scaled = np.isfinite(low) & np.isfinite(high)
            self.clips = True
            self.register_buffer("low", torch.tensor(np.where(scaled, -1.0, low)), persistent=False)
            self.register_buffer("high", torch.tensor(np.where(scaled, 1.0, high)), persistent=False)

    def forward(self, action: Tensor, reward: Tensor, has_prev: Tensor, dtype: torch.dtype) -> Tensor:
        has_prev = has_prev.unsqueeze(1)
        parts = []
        # where, not a product: rows without a predecessor may hold anything, NaN included.
        if self.use_action and self.one_hot is not None:
            parts.append((self.one_hot(action) & has_prev).to(dtype))
        elif self.use_action:
            row = action.to(dtype)
            if self.clips:
                row = row.clamp(self.low.to(dtype), self.high.to(dtype))
            parts += [torch.where(has_prev, row, 0.0), has_prev.to(dtype)]
        if self.use_reward:
            clipped = reward.to(dtype).clamp(-REWARD_CLIP, REWARD_CLIP)
            parts.append(torch.where(has_prev, clipped.unsqueeze(1), 0.0))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
