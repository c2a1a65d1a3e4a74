"""What a model configuration becomes for given spaces: derived settings and refused combinations.

Needs no torch, so that a configuration can be resolved and shown before anything is built.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tetherl.errors import ConfigError
from tetherl.models.config import ModelConfig
from tetherl.spaces import Leaf

DEFAULT_HIDDENS = [64, 64]


def resolve_model(config: ModelConfig, leaves: Sequence[Leaf]) -> ModelConfig:
    """The same configuration with every derived setting filled in, for observations made of these leaves.

    Stays None: `conv_filters` (the default layers for small images, or no images), `fcnet_hiddens` when there
    are only images. Raises ConfigError for a setting that would do nothing.
    """
    images = [leaf for leaf in leaves if leaf.kind == "image"]
    only_images = len(images) == len(leaves)
    if config.fcnet_hiddens is not None and only_images:
        raise ConfigError(
            f"model.fcnet_hiddens: {config.fcnet_hiddens} would do nothing: it is for vectors, and the"
            f" observation is an image (shape {images[0].shape}). For dense layers after the convolutions use"
            " model.post_fcnet_hiddens."
        )
    if config.conv_filters is not None and not images:
        shapes = ", ".join(f"{leaf.name or 'observation'} {leaf.shape}" for leaf in leaves)
        raise ConfigError(
            f"model.conv_filters: would do nothing: no part of the observation is an image ({shapes})."
            " Images have shape (height, width, channels), or (height, width) with dtype uint8. Leave"
            " conv_filters out, or correct the observation space."
        )
    for key in ("fcnet_hiddens", "post_fcnet_hiddens"):
        for units in getattr(config, key) or []:
            if units < 1:
                raise ConfigError(f"model.{key}: every layer needs at least 1 unit; got {getattr(config, key)}")

    def given(value: bool | None, default: bool) -> bool:
        return default if value is None else value

    hiddens = DEFAULT_HIDDENS if config.fcnet_hiddens is None else config.fcnet_hiddens
    return msgspec.structs.replace(
        config,
        fcnet_hiddens=None if only_images else list(hiddens),
        vf_share_layers=given(config.vf_share_layers, bool(images) or config.use_lstm),
        lstm_use_prev_action=given(config.lstm_use_prev_action, config.use_lstm),
    )
