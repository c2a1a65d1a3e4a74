"""The recurrent core: one LSTM layer over packed chunks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tetherl.models import init


class RecurrentCore(nn.Module):
    """[N, inputs] rows of C chunks, one chunk after the other, and [C, 2H] states -> [N, H] and [C, 2H].

    A state is h, then c. A chunk's new state is the one after its own last row, however long the others are.
    """

    def __init__(self, inputs: int, units: int, generator: torch.Generator) -> None:
        super().__init__()
        self.units = units
        self.state_size = 2 * units
        self.lstm = init.lstm(inputs, units, generator)

    def forward(self, x: Tensor, lengths: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state[:, : self.units].contiguous(), state[:, self.units :].contiguous()
        chunks, longest = len(lengths), max(lengths)
        if longest == 1:  # acting: the cell alone takes a quarter of the time
            h, c = torch.lstm_cell(x, (h, c), *self.lstm.all_weights[0])
            return h, torch.cat([h, c], -1)
        hx = (h.unsqueeze(0), c.unsqueeze(0))
        if chunks * longest == x.shape[0]:  # equal lengths: nothing to pack
            out, (h, c) = self.lstm(x.view(chunks, longest, -1).transpose(0, 1), hx)
            out = out.transpose(0, 1).reshape(x.shape[0], self.units)
        else:
            packed, back = pack(x, lengths)
            packed_out, (h, c) = self.lstm(packed, hx)
            out = packed_out.data[back]
        return out, torch.cat([h[0], c[0]], -1)


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
