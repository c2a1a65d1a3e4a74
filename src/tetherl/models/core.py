"""The recurrent core: one LSTM or GRU layer over packed chunks."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tetherl.models import init


class RecurrentCore(nn.Module):
    """[N, inputs] rows of C chunks, one chunk after the other, and [C, S] states -> [N, H] and [C, S].

    A state is h, then c (LSTM, S = 2H), or h alone (GRU, S = H). A chunk's new state is the one after its own last
    row, however long the others are.
    """

    def __init__(self, kind: Literal["lstm", "gru"], inputs: int, units: int, generator: torch.Generator) -> None:
        super().__init__()
        self.kind = kind
        self.units = units
        self.state_size = 2 * units if kind == "lstm" else units
        self.rnn: nn.LSTM | nn.GRU = (init.lstm if kind == "lstm" else init.gru)(inputs, units, generator)

    def train(self, mode: bool = True) -> RecurrentCore:
        """One layer without dropout computes the same either way; cuDNN refuses gradients in evaluation mode."""
        super().train(mode)
        self.rnn.train()
        return self

    def forward(self, x: Tensor, lengths: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
        chunks, longest = len(lengths), max(lengths)
        if longest == 1:  # acting: the cell alone takes a quarter of the time
            return self._cell(x, state)
        if chunks * longest == x.shape[0]:  # equal lengths: nothing to pack
            out, state = self._layer(x.view(chunks, longest, -1).transpose(0, 1), state)
            return out.transpose(0, 1).reshape(x.shape[0], self.units), state
        packed, back = pack(x, lengths)
        out, state = self._layer(packed, state)
        return out.data[back], state

    def _cell(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.rnn.all_weights[0]
        if self.kind == "gru":
            h = torch.gru_cell(x, state.contiguous(), *weights)
            return h, h
        h, c = torch.lstm_cell(x, self._split(state), *weights)
        return h, torch.cat([h, c], -1)

    def _layer(self, x: Tensor | PackedSequence, state: Tensor) -> tuple[Any, Tensor]:
        if self.kind == "gru":
            out, h = self.rnn(x, state.contiguous().unsqueeze(0))
            return out, h[0]
        h, c = self._split(state)
        out, (h, c) = self.rnn(x, (h.unsqueeze(0), c.unsqueeze(0)))
        return out, torch.cat([h[0], c[0]], -1)

    def _split(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return state[:, : self.units].contiguous(), state[:, self.units :].contiguous()


def pack(x: Tensor, lengths: list[int]) -> tuple[PackedSequence, Tensor]:
    """Rows chunk after chunk -> torch's packed form (time-major, longest chunk first), and the index back.

    No padding is ever made, so none can leak: the packed form holds the N real rows in another order.
    """
    counts = np.asarray(lengths)
    starts = np.cumsum(counts) - counts
    order = np.argsort(-counts, kind="stable")
    t = np.arange(counts.max())[:, None]
    alive = t < counts[order]  # [T, C]
    rows = (starts[order] + t)[alive]
    back = np.empty_like(rows)
    back[rows] = np.arange(len(rows))
    unsort = np.empty_like(order)
    unsort[order] = np.arange(len(order))

    def index(a: np.ndarray) -> Tensor:
        return torch.from_numpy(a).to(x.device)

    packed = PackedSequence(x[index(rows)], torch.from_numpy(alive.sum(1)), index(order), index(unsort))
    return packed, index(back)
