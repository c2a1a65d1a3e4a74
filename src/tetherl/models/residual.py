"""The residual image encoder of Espeholt et al. 2018 (IMPALA, arXiv:1802.01561), "large" architecture."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tetherl.models import init

CHANNELS = (16, 32, 32)
UNITS = 256


class ResidualStack(nn.Module):
    """[N, C, H, W] -> [N, width]: three times convolution, pooling by 2 and two residual blocks; then `UNITS` units.

    Every convolution is 3×3 and keeps the size; pooling rounds up: 84 → 42 → 21 → 11.
    """

    def __init__(self, channels: int, height: int, width: int, activation: str, generator: torch.Generator) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for out in CHANNELS:
            layers += [_conv(channels, out, generator), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(out, activation, generator), ResidualBlock(out, activation, generator)]
            channels, height, width = out, -(-height // 2), -(-width // 2)
        self.stacks = nn.Sequential(*layers, init.ACTIVATIONS[activation]())
        self.dense, self.width = init.mlp(channels * height * width, [UNITS], activation, generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.stacks(x).flatten(1))


class ResidualBlock(nn.Module):
    """x + conv(act(conv(act(x))))."""

    def __init__(self, channels: int, activation: str, generator: torch.Generator) -> None:
        super().__init__()
        act = init.ACTIVATIONS[activation]
        self.body = nn.Sequential(
            act(), _conv(channels, channels, generator), act(), _conv(channels, channels, generator)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _conv(inputs: int, outputs: int, generator: torch.Generator) -> nn.Conv2d:
    return init.conv(inputs, outputs, (3, 3), (1, 1), (1, 1), generator)
