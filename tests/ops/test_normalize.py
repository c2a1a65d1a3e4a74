from __future__ import annotations

import numpy as np
import pytest
import torch

from tetherl.ops.normalize import ReturnScaler, RunningMoments, normalize_advantages


def data(n: int = 1000, shape: tuple[int, ...] = (3,)) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, *shape, generator=g, dtype=torch.float64) * 3 + 1e6


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_any_split_gives_the_moments_of_the_whole(shape: tuple[int, ...]) -> None:
    x = data(shape=shape)
    total = RunningMoments(shape)
    for part in x.split([1, 0, 499, 500]):
        worker = RunningMoments(shape)
        worker.update(part)
        total.merge(worker)
    assert total.count == len(x)
    np.testing.assert_allclose(total.mean.numpy(), x.numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(total.variance.numpy(), x.numpy().var(0), rtol=1e-9)


def test_float32_values_are_summed_in_float64() -> None:
    x = data(shape=()).float()
    moments = RunningMoments()
    for part in x.split(10):
        moments.update(part)
    assert moments.mean.dtype == moments.variance.dtype == torch.float64
    np.testing.assert_allclose(float(moments.variance), x.double().numpy().var(), rtol=1e-9)


def test_merging_leaves_the_other_alone_and_empty_ones_change_nothing() -> None:
    a, b = RunningMoments(), RunningMoments()
    b.update(torch.tensor([1.0, 5.0]))
    a.merge(b)
    a.update(torch.tensor([100.0]))
    assert b.count == 2 and float(b.mean) == 3.0 and float(b.variance) == 4.0
    a.merge(RunningMoments())
    assert a.count == 3


def test_the_std_can_be_divided_by() -> None:
    moments = RunningMoments()
    assert float(moments.std) == 1.0
    moments.update(torch.tensor([7.0, 7.0]))
    assert float(moments.variance) == 0.0 and float(moments.std) == pytest.approx(1e-4)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="needs values"):
        RunningMoments().update(torch.zeros(4, 1))
    with pytest.raises(ValueError, match="needs values"):
        RunningMoments((3,)).update(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="cannot merge"):
        RunningMoments((3,)).merge(RunningMoments())
    with pytest.raises(ValueError, match="valid rows"):
        normalize_advantages(torch.zeros(4, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalised_advantages(dtype: torch.dtype) -> None:
    out = normalize_advantages(torch.tensor([1.0, 2.0, 6.0, -3.0], dtype=dtype))
    assert out.dtype == dtype
    assert float(out.mean()) == pytest.approx(0, abs=1e-6)
    assert float(out.std(correction=0)) == pytest.approx(1, rel=1e-5)


def test_without_spread_only_the_mean_is_subtracted() -> None:
    assert normalize_advantages(torch.tensor([5.0])).tolist() == [0.0]
    assert normalize_advantages(torch.zeros(0)).tolist() == []
    tiny = normalize_advantages(torch.tensor([5.0, 5.0 + 1e-7], dtype=torch.float64))
    assert float(tiny.abs().max()) < 1e-6
    enough = normalize_advantages(torch.tensor([5.0, 5.0 + 1e-5], dtype=torch.float64))
    assert float(enough.abs().max()) > 0.9


def test_return_scaling_follows_each_environment_on_its_own() -> None:
    """Two environments side by side, in two calls and with padding, against plain loops over each."""
    g = torch.Generator().manual_seed(1)
    rewards = torch.randn(30, 2, generator=g)
    done = torch.rand(30, 2, generator=g) < 0.2
    scaler = ReturnScaler(0.9)
    first = scaler.update(rewards[:11], done[:11])
    carried = first[-1].masked_fill(done[10], 0.0)
    pad = torch.full((3, 2), float("nan"))
    mask = torch.arange(22).unsqueeze(1).expand(22, 2) < 19
    second = scaler.update(torch.cat([rewards[11:], pad]), torch.cat([done[11:], pad > 0]), carried, mask)
    rows = torch.cat([first, second[:19]])
    assert scaler.moments.count == 60
    for env in range(2):
        total = 0.0
        for t in range(30):
            total = 0.9 * total + float(rewards[t, env])
            assert float(rows[t, env]) == pytest.approx(total, rel=1e-9)
            total = 0.0 if done[t, env] else total
    deviation = np.sqrt(rows.numpy().var() + 1e-8)
    np.testing.assert_allclose(scaler.scale(rewards).numpy(), rewards.numpy() / deviation, rtol=1e-6)
    assert scaler.scale(torch.tensor([1e9, -1e9])).tolist() == [10.0, -10.0]


def test_return_scaling_depends_on_the_order_and_on_the_ends() -> None:
    rewards = torch.tensor([[1.0], [5.0], [0.0], [0.0]])
    never, ends = torch.zeros(4, 1, dtype=torch.bool), torch.tensor([[False], [True], [False], [False]])

    def deviation(rewards: torch.Tensor, done: torch.Tensor) -> float:
        scaler = ReturnScaler(0.9)
        scaler.update(rewards, done)
        return float(scaler.moments.std)

    assert deviation(rewards, never) != deviation(rewards.flip(0), never)
    assert deviation(rewards, never) != deviation(rewards, ends)
    with pytest.raises(ValueError, match=r"\[T, B\]"):
        ReturnScaler(0.9).update(rewards[:, 0], never[:, 0])
    with pytest.raises(ValueError, match=r"start \[B\], got .* and \[2\]"):
        ReturnScaler(0.9).update(rewards, never, torch.zeros(2))
