"""Encoders that users write: found by name, asked once what they give."""

from __future__ import annotations

import importlib

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from tetherl.errors import ConfigError
from tetherl.models.config import ModelConfig
from tetherl.spaces import ObservationCodec


class CustomEncoder(nn.Module):
    """A user's module in place of ours: {leaf name: [N, *leaf.shape]} -> [N, width].

    The class is called with (observation_space, action_space, config); its `forward` is given the observation's
    leaves and returns features. `width` is found by trying two observations of zeros. Weights that the class draws
    from torch's global generator follow the policy's seed, and that generator is left as it was.

    Raises ConfigError for a name that cannot be imported, a constructor or forward pass that fails, and features of
    another form.
    """

    def __init__(
        self, observation_space: Space, action_space: Space, config: ModelConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        assert config.custom is not None
        self._name = config.custom
        build = _find(config.custom)
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                self.module = build(observation_space, action_space, config)
            except Exception as error:  # user code may raise anything
                raise ConfigError(f"model.custom: {self._name!r} cannot be built: {_text(error)}") from error
            if not isinstance(self.module, nn.Module):
                raise ConfigError(
                    f"model.custom: {self._name!r} gave a {type(self.module).__name__}, expected a torch.nn.Module"
                )
            self.width = self._try(ObservationCodec(observation_space))

    def forward(self, obs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return self.module(obs).to(dtype)

    def _try(self, codec: ObservationCodec) -> int:
        """Width of the features of two observations of zeros."""
        rows = {leaf.name: torch.from_numpy(np.zeros((2, *leaf.shape), leaf.dtype)) for leaf in codec.leaves}
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                features = self.module(rows)
        except Exception as error:
            shapes = ", ".join(f"{name!r}: {list(row.shape)} {row.dtype}" for name, row in rows.items())
            raise ConfigError(
                f"model.custom: {self._name!r} fails on two observations of zeros ({shapes}): {_text(error)}"
            ) from error
        self.module.train(training)
        if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[0] != 2:
            came = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ConfigError(
                f"model.custom: {self._name!r} must return features [N, width], here [2, width] for two observations; "
                f"got {came}"
            )
        return int(features.shape[1])


def _find(name: str) -> type[nn.Module]:
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"model.custom: {name!r} names no class; expected 'module:Name'")
    try:
        found: type[nn.Module] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model.custom: {name!r} cannot be imported: {error}. Expected 'module:Name'.") from error
    return found


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
