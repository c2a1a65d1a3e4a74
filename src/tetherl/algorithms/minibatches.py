"""How a batch is cut into minibatches: single rows, or whole chunks for recurrent policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tetherl.data.batch import ranges


@dataclass(slots=True)
class Minibatch:
    """Rows for one optimizer step.

    rows [n]: batch rows that go through the network, packed chunk after chunk for recurrent policies.
    picked [m] or None: which of the n outputs enter the loss; None means all of them.
    trained [m]: the batch rows that enter the loss (`rows[picked]`).
    chunks [c] / lengths: the chunks, and their rows; None without recurrence.
    """

    rows: np.ndarray
    picked: np.ndarray | None
    trained: np.ndarray
    chunks: np.ndarray | None = None
    lengths: list[int] | None = None


def row_minibatches(valid: np.ndarray, size: int, generator: torch.Generator) -> Iterator[Minibatch]:
    """Every valid row once, in random order; the last minibatch may be smaller. valid: [N] bool."""
    rows = np.flatnonzero(valid)
    rows = rows[_permutation(len(rows), generator)]
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        yield Minibatch(rows=some, picked=None, trained=some)


def chunk_minibatches(
    valid: np.ndarray, chunks: np.ndarray, size: int, generator: torch.Generator
) -> Iterator[Minibatch]:
    """Every chunk that has a valid row once, in random order, in minibatches of at most `size` valid rows.

    A single chunk with more valid rows is a minibatch of its own: chunks are never cut, rows never shuffled.
    valid: [N] bool, chunks: [C, 4] of `chunk_table`.
    """
    counts = np.add.reduceat(valid.astype(np.int64), chunks[:, 3])
    ids = np.flatnonzero(counts)
    ids = ids[_permutation(len(ids), generator)]
    for some in _fill(ids, counts, size):
        lengths = chunks[some, 2]
        rows = ranges(chunks[some, 3], lengths)
        picked = np.flatnonzero(valid[rows])
        yield Minibatch(
            rows=rows,
            picked=None if len(picked) == len(rows) else picked,
            trained=rows[picked],
            chunks=some,
            lengths=lengths.tolist(),
        )


def _permutation(n: int, generator: torch.Generator) -> np.ndarray:
    return torch.randperm(n, generator=generator).numpy()


def _fill(ids: np.ndarray, counts: np.ndarray, size: int) -> Iterator[np.ndarray]:
    start = total = 0
    for at, count in enumerate(counts[ids].tolist()):
        if total and total + count > size:
            yield ids[start:at]
            start, total = at, 0
        total += count
    if total:
        yield ids[start:]
