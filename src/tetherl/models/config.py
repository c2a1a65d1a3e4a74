"""Settings of the network. None means: derived from the spaces, see `tetherl config`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Activation = Literal["tanh", "relu", "silu", "elu"]
PositiveInt = Annotated[int, Meta(ge=1)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `model` section."""

    fcnet_hiddens: Annotated[
        list[PositiveInt] | None,
        Meta(description="dense layers for vector observations; default [64, 64]; not used for images"),
    ] = None
    fcnet_activation: Annotated[Activation, Meta(description="activation of `fcnet_hiddens`")] = "tanh"
    conv_filters: Annotated[
        list[Any] | None,
        Meta(description="convolutions [channels, [kernel_h, kernel_w], stride]; padded 'same' but the last"),
    ] = None
    conv_activation: Annotated[Activation, Meta(description="activation of `conv_filters`")] = "relu"
    post_fcnet_hiddens: Annotated[
        list[PositiveInt],
        Meta(description="dense layers between the encoder and the recurrent core or the heads"),
    ] = []
    post_fcnet_activation: Annotated[Activation, Meta(description="activation of `post_fcnet_hiddens`")] = "relu"
    vf_share_layers: Annotated[
        bool | None,
        Meta(description="value function shares encoder and core; default: true with images or an LSTM"),
    ] = None
    use_lstm: Annotated[bool, Meta(description="recurrent core: one LSTM layer after the encoder")] = False
    lstm_cell_size: Annotated[int, Meta(ge=1, description="units of the LSTM")] = 128
    max_seq_len: Annotated[int, Meta(ge=1, description="longest chunk, in steps, through which gradients flow")] = 32
    lstm_use_prev_action: Annotated[
        bool | None, Meta(description="previous action as input; default: true with an LSTM")
    ] = None
    lstm_use_prev_reward: Annotated[bool, Meta(description="previous reward (clipped to ±10) as input")] = False
    log_std_init: Annotated[float, Meta(description="initial log standard deviation for Box actions")] = -0.5
