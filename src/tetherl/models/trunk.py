"""Everything between observation and heads: encoders, previous action and reward, dense layers, core."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tetherl.models import init
from tetherl.models.config import ModelConfig
from tetherl.models.core import RecurrentCore
from tetherl.models.custom import CustomEncoder
from tetherl.models.encoders import ObservationEncoder
from tetherl.spaces import Leaf

JOINT_UNITS = 128
"""Width of the layer that joins several inputs when no `post_fcnet_hiddens` and no recurrent core would."""


class Trunk(nn.Module):
    """[N, *leaf] observations and [N, previous] inputs -> features [N, width], new states [C, state_size].

    With a core: encoders → post_fcnet → (+ previous) → core. Without: encoders (+ previous) → post_fcnet.
    Several inputs that would only meet in a head (linear: blind to their combinations) get one joint layer. A custom
    encoder takes the place of all others.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        previous: int,
        config: ModelConfig,
        generator: torch.Generator,
        custom: CustomEncoder | None = None,
    ) -> None:
        super().__init__()
        self.encoder = custom or ObservationEncoder(leaves, config, generator)
        width = self.encoder.width
        self.previous_early = bool(previous) and config.core is None
        if self.previous_early:
            width += previous
        hiddens, activation = config.post_fcnet_hiddens, config.post_fcnet_activation
        several = (len(leaves) > 1 and custom is None) or self.previous_early
        if not hiddens and config.core is None and several:
            hiddens = [JOINT_UNITS]
        self.post, width = init.mlp(width, hiddens, activation, generator)
        self.core: RecurrentCore | None = None
        if config.core is not None:
            self.core = RecurrentCore(config.core, width + previous, config.lstm_cell_size, generator)
            width = self.core.units
        self.state_size = self.core.state_size if self.core is not None else 0
        self.width = width

    def forward(
        self,
        obs: dict[str, Tensor],
        previous: Tensor | None,
        lengths: list[int] | None,
        state: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        x = self.encoder(obs, dtype)
        if self.previous_early and previous is not None:
            x = torch.cat([x, previous], -1)
        x = self.post(x)
        if self.core is None:
            return x, None
        if previous is not None:
            x = torch.cat([x, previous], -1)
        if lengths is None or state is None:
            raise ValueError("a recurrent policy needs the lengths of the chunks and their states")
        return self.core(x, lengths, state)
