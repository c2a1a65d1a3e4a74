from __future__ import annotations

import numpy as np
import pytest
import torch

from tetherl.algorithms.minibatches import chunk_minibatches, row_minibatches
from tetherl.data.batch import chunk_table


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def valid():
    return np.random.default_rng(0).random(103) < 0.7


def test_rows_are_covered_once_and_the_last_minibatch_is_what_is_left(valid):
    valid[np.flatnonzero(valid)[55:]] = False  # three minibatches of 16, and 7
    batches = list(row_minibatches(valid, 16, generator()))
    rows = np.concatenate([b.trained for b in batches])
    assert sorted(rows) == np.flatnonzero(valid).tolist()
    assert rows.tolist() != sorted(rows)
    assert {len(b.trained) for b in batches[:-1]} == {16}
    assert len(batches[-1].trained) == valid.sum() % 16


def test_chunks_are_covered_once_and_never_cut(valid):
    chunks = chunk_table(np.array([40, 3, 60]), 8)
    batches = list(chunk_minibatches(valid, chunks, 16, generator()))
    trained = np.concatenate([b.trained for b in batches])
    assert sorted(trained) == np.flatnonzero(valid).tolist()
    seen = np.concatenate([b.chunks for b in batches])
    assert len(set(seen)) == len(seen)
    for b in batches:
        expected = np.concatenate([np.arange(s, s + n) for _, _, n, s in chunks[b.chunks]])
        assert np.array_equal(b.rows, expected) and b.lengths == chunks[b.chunks, 2].tolist()
        picked = b.rows if b.picked is None else b.rows[b.picked]
        assert np.array_equal(picked, b.trained) and valid[b.trained].all()
        assert len(b.trained) <= 16


def test_minibatches_of_chunks_are_filled():
    chunks = chunk_table(np.full(16, 8), 8)
    sizes = [len(b.trained) for b in chunk_minibatches(np.ones(128, bool), chunks, 48, generator())]
    assert sizes == [48, 48, 32]


def test_a_chunk_larger_than_a_minibatch_stands_alone():
    chunks = chunk_table(np.array([200, 200]), 200)
    batches = list(chunk_minibatches(np.ones(400, bool), chunks, 64, generator()))
    assert [len(b.trained) for b in batches] == [200, 200]


def test_chunks_without_a_valid_row_are_left_out():
    valid = np.zeros(24, bool)
    valid[9] = True
    (only,) = chunk_minibatches(valid, chunk_table(np.array([24]), 8), 64, generator())
    assert only.chunks.tolist() == [1] and only.picked.tolist() == [1] and only.trained.tolist() == [9]


def test_the_seed_decides_the_order(valid):
    def order(seed):
        return np.concatenate([b.trained for b in row_minibatches(valid, 16, generator(seed))]).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(2048, [256] * 8), (2053, [257] * 5 + [256] * 3), (2100, [256] * 8 + [52]), (200, [200]), (0, [])],
)
def test_a_handful_of_rows_is_no_minibatch_of_its_own(rows, sizes):
    parts = list(row_minibatches(np.ones(rows, bool), 256, torch.Generator().manual_seed(0)))
    assert [len(p.trained) for p in parts] == sizes
    assert sorted(np.concatenate([p.trained for p in parts] or [[]]).tolist()) == list(range(rows))
