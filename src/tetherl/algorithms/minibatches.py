"""How a batch is cut into minibatches: single rows, or whole chunks for recurrent policies.

With several learners every one of them draws the same minibatches (same generator, same order of calls) and takes an
interleaved slice of each: their union is the minibatch that one learner alone would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tetherl.data.batch import ranges

Part = tuple[int, int]
"""(which learner, of how many)."""


@dataclass(slots=True)
class Minibatch:
    """Rows for one optimizer step.

    rows [n]: batch rows that go through the network, packed chunk after chunk for recurrent policies.
    picked [m] or None: which of the n outputs enter the loss; None means all of them.
    trained [m]: the batch rows that enter the loss (`rows[picked]`).
    chunks [c] / lengths: the chunks, and their rows; None without recurrence.
    whole [M] or None: the trained rows of all learners together; None: there is one learner. Everything else may be
    empty when it is not.
    """

    rows: np.ndarray
    picked: np.ndarray | None
    trained: np.ndarray
    chunks: np.ndarray | None = None
    lengths: list[int] | None = None
    whole: np.ndarray | None = None

    @property
    def count(self) -> int:
        """Rows that enter the loss, over all learners."""
        return len(self.trained) if self.whole is None else len(self.whole)


def row_minibatches(
    valid: np.ndarray, size: int, generator: torch.Generator, *, shuffle: bool = True, part: Part = (0, 1)
) -> Iterator[Minibatch]:
    """Every valid row once, in random order; the last minibatch may be smaller. valid: [N] bool.

    A rest of less than an eighth of a minibatch is spread over the others, which are then a little larger than `size`:
    a whole optimizer step on a handful of rows would be mostly noise.
    """
    rows = np.flatnonzero(valid)
    if shuffle:
        rows = rows[_permutation(len(rows), generator)]
    rank, learners = part
    full, rest = divmod(len(rows), size)
    spread = full > 0 and 8 * rest < size
    parts = np.array_split(rows, full) if spread else [rows[i : i + size] for i in range(0, len(rows), size)]
    for whole in parts:
        some = whole[rank::learners]
        yield Minibatch(rows=some, picked=None, trained=some, whole=whole if learners > 1 else None)


def chunk_minibatches(
    valid: np.ndarray,
    chunks: np.ndarray,
    size: int,
    generator: torch.Generator,
    *,
    shuffle: bool = True,
    part: Part = (0, 1),
) -> Iterator[Minibatch]:
    """Every chunk that has a valid row once, in random order, in minibatches of at most `size` valid rows.

    A single chunk with more valid rows is a minibatch of its own: chunks are never cut, rows never shuffled.
    valid: [N] bool, chunks: [C, 4] of `chunk_table`.
    """
    counts = np.add.reduceat(valid.astype(np.int64), chunks[:, 3])
    ids = np.flatnonzero(counts)
    if shuffle:
        ids = ids[_permutation(len(ids), generator)]
    rank, learners = part
    for union in _fill(ids, counts, size):
        some = union[rank::learners]
        lengths = chunks[some, 2]
        rows = ranges(chunks[some, 3], lengths)
        picked = np.flatnonzero(valid[rows])
        whole = None
        if learners > 1:
            whole = ranges(chunks[union, 3], chunks[union, 2])
            whole = whole[valid[whole]]
        yield Minibatch(
            rows=rows,
            picked=None if len(picked) == len(rows) else picked,
            trained=rows[picked],
            chunks=some,
            lengths=lengths.tolist(),
            whole=whole,
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
