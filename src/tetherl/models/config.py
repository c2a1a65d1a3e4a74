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
    encoder: Annotated[
        Literal["nature", "impala"] | None,
        Meta(description="known layers for images: nature (also the default up to 96 pixels) or impala (residual)"),
    ] = None
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
        Meta(description="value function shares encoder and core; default: true with images or a recurrent core"),
    ] = None
    use_lstm: Annotated[bool, Meta(description="one LSTM layer after the encoder; the same as rnn: lstm")] = False
    rnn: Annotated[
        Literal["lstm", "gru"] | None, Meta(description="recurrent core: one layer of this kind after the encoder")
    ] = None
    lstm_cell_size: Annotated[int, Meta(ge=1, description="units of the recurrent core, LSTM or GRU")] = 128
    max_seq_len: Annotated[int, Meta(ge=1, description="longest chunk, in steps, through which gradients flow")] = 32
    lstm_use_prev_action: Annotated[
        bool | None, Meta(description="previous action as input; default: true with a recurrent core")
    ] = None
    lstm_use_prev_reward: Annotated[bool, Meta(description="previous reward (clipped to ±10) as input")] = False
    normalize_observations: Annotated[
        bool, Meta(description="vectors minus their running mean, over their running deviation, clipped to ±10")
    ] = False
    custom: Annotated[
        str | None, Meta(description='encoder of your own, "module:Name" of a torch module class; see docs/models.md')
    ] = None
    custom_config: Annotated[dict[str, Any], Meta(description="settings that `custom` finds in its config")] = {}
    log_std_init: Annotated[float, Meta(description="initial log standard deviation for Box actions")] = -0.5
    action_distribution: Annotated[
        Literal["gaussian", "tanh"],
        Meta(description="Box actions: a normal, clipped to the bounds, or its tanh, stretched to (finite) bounds"),
    ] = "gaussian"

    @property
    def core(self) -> Literal["lstm", "gru"] | None:
        """Kind of the recurrent core; None without one."""
        return self.rnn or ("lstm" if self.use_lstm else None)
