"""Layers with orthogonal weights and zero biases, drawn from a given generator (never the global one)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format, skip_init

HIDDEN_GAIN = 2**0.5
RECURRENT_GAIN = 1.0
POLICY_GAIN = 0.01
VALUE_GAIN = 1.0

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU, "elu": nn.ELU}


def dense(inputs: int, outputs: int, generator: torch.Generator, gain: float = HIDDEN_GAIN) -> nn.Linear:
    """A dense layer, [N, inputs] -> [N, outputs]."""
    layer = skip_init(nn.Linear, inputs, outputs)
    _fill(layer, generator, gain)
    return layer


def conv(
    inputs: int,
    channels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    generator: torch.Generator,
) -> nn.Conv2d:
    """[N, inputs, H, W] -> [N, channels, H', W']; `padding` is (vertical, horizontal), on both sides."""
    layer = skip_init(nn.Conv2d, inputs, channels, kernel, stride, padding)
    _fill(layer, generator, HIDDEN_GAIN)
    # Images arrive with the channels last; weights laid out alike save up to two thirds of the time.
    convert_conv2d_weight_memory_format(layer, torch.channels_last)
    return layer


def lstm(inputs: int, units: int, generator: torch.Generator) -> nn.LSTM:
    """One LSTM layer, time-major."""
    # What skip_init does; it cannot read the signature of nn.LSTM.
    layer = nn.LSTM(inputs, units, device="meta").to_empty(device="cpu")
    _fill(layer, generator, RECURRENT_GAIN, rows=units)
    return layer


def gru(inputs: int, units: int, generator: torch.Generator) -> nn.GRU:
    """One GRU layer, time-major."""
    layer = nn.GRU(inputs, units, device="meta").to_empty(device="cpu")  # see lstm
    _fill(layer, generator, RECURRENT_GAIN, rows=units)
    return layer


def mlp(inputs: int, hiddens: list[int], activation: str, generator: torch.Generator) -> tuple[nn.Sequential, int]:
    """Dense layers with an activation after each, and the width they end in (`inputs` if there are none)."""
    layers: list[nn.Module] = []
    for units in hiddens:
        layers += [dense(inputs, units, generator), ACTIVATIONS[activation]()]
        inputs = units
    return nn.Sequential(*layers), inputs


def _fill(layer: nn.Module, generator: torch.Generator, gain: float, rows: int | None = None) -> None:
    """rows: a matrix of a recurrent layer is several, one for each gate, of so many rows; each becomes orthogonal."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                for matrix in parameter.split(rows or len(parameter)):
                    nn.init.orthogonal_(matrix, gain, generator=generator)
            else:
                parameter.zero_()
