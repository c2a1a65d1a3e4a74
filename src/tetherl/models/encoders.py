"""Encoders of observations: one per leaf, [N, *leaf.shape] -> [N, width], concatenated in leaf order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tetherl.models import init
from tetherl.models.config import ModelConfig
from tetherl.models.conv_plan import image_layout, plan_convs
from tetherl.models.residual import ResidualStack
from tetherl.spaces import Leaf


class OneHot(nn.Module):
    """Integers from 0 -> one-hot, part after part: [N, parts] int64 -> [N, sum(nvec)] bool."""

    part: Tensor
    value: Tensor

    def __init__(self, nvec: Sequence[int]) -> None:
        super().__init__()
        self.width = int(sum(nvec))
        part = torch.repeat_interleave(torch.arange(len(nvec)), torch.tensor(list(nvec)))
        value = torch.cat([torch.arange(int(n)) for n in nvec])
        self.register_buffer("part", part, persistent=False)
        self.register_buffer("value", value, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return ids.index_select(1, self.part) == self.value


class ImageEncoder(nn.Module):
    """Convolutions over the images of one leaf."""

    def __init__(self, leaf: Leaf, config: ModelConfig, generator: torch.Generator) -> None:
        super().__init__()
        layout = image_layout(leaf.shape)
        self.axes = layout.axes
        self.scale = input_scale(leaf)
        self.residual: ResidualStack | None = None
        if config.encoder == "impala":
            self.residual = ResidualStack(
                layout.channels, layout.height, layout.width, config.conv_activation, generator
            )
            self.width = self.residual.width
            return
        plan, units = plan_convs(leaf.shape, config.conv_filters, name=leaf.name, any_size=config.encoder == "nature")
        layers: list[nn.Module] = []
        channels = layout.channels
        for layer in plan:
            left, right, top, bottom = layer.padding
            # Equal padding on both sides costs no copy when the convolution does it.
            equal = left == right and top == bottom
            if not equal:
                layers.append(nn.ZeroPad2d(layer.padding))
            padding = (top, left) if equal else (0, 0)
            layers += [
                init.conv(channels, layer.channels, layer.kernel, layer.stride, padding, generator),
                init.ACTIVATIONS[config.conv_activation](),
            ]
            channels = layer.channels
        self.convs = nn.Sequential(*layers)
        self.width = math.prod(plan[-1].out)
        self.dense = nn.Sequential()
        if units is not None:
            self.dense, self.width = init.mlp(self.width, [units], config.conv_activation, generator)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = self.pixels(x, dtype)
        if self.residual is not None:
            return self.residual(x)
        return self.dense(self.convs(x).flatten(1))

    def pixels(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What the first convolution sees: [N, C, H, W], in [0, 1] where the bounds tell the scale."""
        x = scaled(x, dtype, self.scale)
        if self.axes == "hw":
            return x.unsqueeze(1)
        return x.permute(0, 3, 1, 2) if self.axes == "hwc" else x


class VectorEncoder(nn.Module):
    """Dense layers over the numbers of one leaf, flattened; integers that are names are one-hot."""

    def __init__(self, leaf: Leaf, config: ModelConfig, generator: torch.Generator) -> None:
        super().__init__()
        # What has been normalised has no scale of its own left.
        self.scale = 1.0 if config.normalize_observations else input_scale(leaf)
        self.one_hot = OneHot(leaf.nvec) if leaf.kind in ("discrete", "multidiscrete") and leaf.nvec else None
        inputs = self.one_hot.width if self.one_hot is not None else math.prod(leaf.shape)
        hiddens = config.fcnet_hiddens or []
        self.dense, self.width = init.mlp(inputs, hiddens, config.fcnet_activation, generator)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        x = scaled(x, dtype, self.scale) if self.one_hot is None else self.one_hot(x).to(dtype)
        return self.dense(x)


class ObservationEncoder(nn.Module):
    """All leaves: {leaf name: [N, *leaf.shape]} -> [N, width]."""

    def __init__(self, leaves: Sequence[Leaf], config: ModelConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.names = [leaf.name for leaf in leaves]
        self.leaves = nn.ModuleDict()
        self.width = 0
        for i, leaf in enumerate(leaves):
            kind = ImageEncoder if leaf.kind == "image" else VectorEncoder
            encoder = kind(leaf, config, generator)
            # The index keeps keys unique where torch allows fewer characters than our leaf names.
            self.leaves[f"{i}_{leaf.name.replace('.', '_')}" if leaf.name else str(i)] = encoder
            self.width += encoder.width
        self._encoders = list(self.leaves.values())

    def forward(self, obs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        parts = [encoder(obs[name], dtype) for name, encoder in zip(self.names, self._encoders, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def scaled(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`x` as floats times `scale`; never changes its argument."""
    x = x.to(dtype)
    return x if scale == 1.0 else x * scale


def input_scale(leaf: Leaf) -> float:
    """1/255 where the declared values go from 0 to 255, 1/high for bytes up to another bound; else 1: untouched."""
    if leaf.kind not in ("box", "image") or leaf.low is None or leaf.high is None:
        return 1.0
    low, high = float(np.min(leaf.low)), float(np.max(leaf.high))
    byte = leaf.dtype == np.uint8 and high > 1
    return 1 / high if byte or (low == 0 and high == 255) else 1.0
