from __future__ import annotations

import pytest
import torch

from tetherl.ops.metrics import iqm, iqm_interval


def test_a_quarter_is_cut_off_at_each_end() -> None:
    assert float(iqm(torch.tensor([1e9, 1.0, 2.0, -1e9]))) == 1.5
    assert float(iqm(torch.tensor([3.0, 1.0, 2.0]))) == 2.0  # too few for a quarter
    rows = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6, 99], [7.0] * 8])
    assert iqm(rows).tolist() == [3.5, 7.0]
    for empty in (torch.zeros(0), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="scores"):
            iqm(empty)


def test_the_interval_covers_the_known_value_about_as_often_as_it_says() -> None:
    g, hits, trials = torch.Generator().manual_seed(0), 0, 200
    for trial in range(trials):
        tasks = [torch.randn(20, generator=g), torch.randn(20, generator=g)]
        middle, low, high = iqm_interval(tasks, resamples=400, seed=trial)
        assert low <= middle <= high
        hits += low <= 0 <= high
    assert 0.88 <= hits / trials <= 0.99


def test_resampling_stays_within_each_task() -> None:
    """All runs of a task are alike: nothing can vary; mixed together they would."""
    tasks = [torch.zeros(10), torch.full((10,), 100.0)]
    assert iqm_interval(tasks) == (50.0, 50.0, 50.0)
    _, low, high = iqm_interval([torch.cat(tasks)])
    assert low < 50 < high


def test_the_interval_is_repeatable_and_narrows_with_confidence() -> None:
    tasks = [torch.arange(30.0)]
    assert iqm_interval(tasks, seed=1) == iqm_interval(tasks, seed=1) != iqm_interval(tasks, seed=2)
    wide, narrow = iqm_interval(tasks, confidence=0.99), iqm_interval(tasks, confidence=0.5)
    assert wide[1] < narrow[1] < narrow[2] < wide[2]
    with pytest.raises(ValueError, match="per task"):
        iqm_interval([])
    with pytest.raises(ValueError, match="confidence"):
        iqm_interval(tasks, confidence=1.0)
