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

    Stays None: `conv_filters` and `encoder` (the default layers for small images, or no images), `fcnet_hiddens` when
    there are only images. Raises ConfigError for settings that would do nothing or contradict each other; what a
    custom encoder does with the settings of ours is its own affair.
    """
    images = [leaf for leaf in leaves if leaf.kind == "image"]
    only_images = len(images) == len(leaves)
    _refuse_contradictions(config)
    if config.normalize_observations and not any(leaf.kind == "box" for leaf in leaves):
        raise ConfigError(
            "model.normalize_observations: would do nothing: no part of the observation is a vector of numbers"
            f" ({_shapes(leaves)}). Images, discrete values and bits are never normalised. Leave it out."
        )
    if config.fcnet_hiddens is not None and only_images and config.custom is None:
        raise ConfigError(
            f"model.fcnet_hiddens: {config.fcnet_hiddens} would do nothing: it is for vectors, and the"
            f" observation is an image (shape {images[0].shape}). For dense layers after the convolutions use"
            " model.post_fcnet_hiddens."
        )
    for key in ("conv_filters", "encoder"):
        if getattr(config, key) is not None and not images and config.custom is None:
            raise ConfigError(
                f"model.{key}: would do nothing: no part of the observation is an image ({_shapes(leaves)})."
                " Images have shape (height, width, channels), or (height, width) with dtype uint8. Leave"
                f" {key} out, or correct the observation space."
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
        vf_share_layers=given(config.vf_share_layers, bool(images) or config.core is not None),
        lstm_use_prev_action=given(config.lstm_use_prev_action, config.core is not None),
    )


def _refuse_contradictions(config: ModelConfig) -> None:
    """Settings that cannot both be meant, whatever the observations are."""
    if config.use_lstm and config.rnn == "gru":
        raise ConfigError(
            "model.use_lstm, model.rnn: use_lstm is true and rnn is gru; a policy has one core. Drop one."
        )
    if config.encoder is not None and config.conv_filters is not None:
        raise ConfigError(
            f"model.encoder, model.conv_filters: both say what the convolutions are ({config.encoder}, and a list of"
            f" {len(config.conv_filters)}); drop one."
        )
    if config.custom is None and config.custom_config:
        raise ConfigError("model.custom_config: does nothing without model.custom; set model.custom, or leave it out.")


def _shapes(leaves: Sequence[Leaf]) -> str:
    return ", ".join(f"{leaf.name or 'observation'} {leaf.shape}" for leaf in leaves)
