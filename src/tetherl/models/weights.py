"""The numbers of a network as arrays by name, and back again with errors that say what does not fit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from tetherl.errors import CheckpointError

OTHER = "they belong to a network with another model configuration or other spaces."


def copy_weights(module: nn.Module) -> dict[str, np.ndarray]:
    """Parameters and buffers, copied, in their own number types (float32; running statistics float64)."""
    # C order, whatever the layout of the tensor: files and shared memory need it.
    return {name: np.array(t.detach().cpu().numpy(), order="C") for name, t in module.state_dict().items()}


def load_weights(module: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Set every parameter and buffer; all or nothing.

    CheckpointError names the first array that is missing, of another shape, not a number, or unknown.
    """
    own = module.state_dict()
    ready: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, (name, tensor) in enumerate(own.items()):
        where = f"weight {i + 1} of {len(own)}, {name!r}"
        if name not in weights:
            raise CheckpointError(
                f"{where}, shape {_shape(tensor.shape)}, is missing in the weights that were given: {OTHER}"
            )
        array = np.asarray(weights[name])
        if array.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{where}, has shape {_shape(tensor.shape)} in this network, but the given weights have"
                f" {_shape(array.shape)}: {OTHER}"
            )
        if array.dtype.kind not in ("fiub" if tensor.dtype is torch.bool else "fiu"):
            raise CheckpointError(f"{where}, must hold numbers; the given array has dtype {array.dtype}.")
        ready.append((tensor, torch.tensor(array)))
    for name in weights:
        if name not in own:
            raise CheckpointError(
                f"the given weights hold {name!r}, shape {_shape(np.shape(weights[name]))}, and this network"
                f" has no such layer: {OTHER}"
            )
    with torch.no_grad():
        for tensor, new in ready:
            tensor.copy_(new)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(str(n) for n in shape) or "a single number"
