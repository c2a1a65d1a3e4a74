from __future__ import annotations

import math

import pytest
import torch

from tetherl.ops import losses
from tetherl.ops.distributions import Categorical

N = 8


def rows(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [0.2, "rows"])
def test_policy_loss_row_by_row(dtype: torch.dtype, clip: float | str) -> None:
    new, old, adv = (rows(seed, dtype) * 0.5 for seed in (1, 2, 3))
    eps = torch.linspace(0.05, 0.8, N, dtype=dtype) if clip == "rows" else torch.full((N,), 0.2, dtype=dtype)
    actual = losses.clipped_policy_loss(new, old, adv, eps if clip == "rows" else 0.2)
    assert actual.dtype == dtype
    for i in range(N):
        ratio, a, e = math.exp(float(new[i] - old[i])), float(adv[i]), float(eps[i])
        expected = -min(ratio * a, min(max(ratio, 1 - e), 1 + e) * a)
        assert float(actual[i]) == pytest.approx(expected, rel=1e-5)


def test_gradients_reach_the_new_policy_only() -> None:
    new, old, adv, weights = (rows(seed).requires_grad_() for seed in range(4))
    losses.clipped_policy_loss(new, old, adv, 0.2, weights).sum().backward()
    assert new.grad is not None and bool(new.grad.any())
    assert old.grad is None and adv.grad is None and weights.grad is None
    values, targets = rows(4).requires_grad_(), rows(5).requires_grad_()
    losses.value_loss(values, targets).sum().backward()
    assert targets.grad is None
    torch.testing.assert_close(values.grad, 2 * (values - targets).detach())


def test_on_fresh_data_the_gradient_is_that_of_plain_policy_gradient() -> None:
    new, adv = rows(1).requires_grad_(), rows(2)
    losses.clipped_policy_loss(new, new.detach(), adv, 0.2).sum().backward()
    torch.testing.assert_close(new.grad, -adv)


def test_extreme_ratios_stay_finite() -> None:
    new = torch.tensor([0.0, -1e4]).requires_grad_()
    old = torch.tensor([-1e4, 0.0])
    loss = losses.clipped_policy_loss(new, old, torch.tensor([-1.0, 1.0]), 0.2)
    loss.sum().backward()
    assert torch.all(torch.isfinite(loss)) and new.grad is not None and torch.all(torch.isfinite(new.grad))
    assert losses.log_ratio(new, old).tolist() == [20.0, -20.0]


def test_lag_scaled_clip() -> None:
    lag = torch.tensor([0, 1, 4, 8, 16, 40])
    eps = losses.lag_scaled_clip(0.2, lag, 0.2, 0.8)
    torch.testing.assert_close(eps, torch.tensor([0.2, 0.24, 0.36, 0.52, 0.8, 0.8]))
    assert losses.lag_scaled_clip(0.2, lag.double(), 0.2, 0.8).dtype == torch.float64
    assert torch.all(losses.lag_scaled_clip(0.2, lag, 0.0, 0.8) == 0.2)


def test_outside_clip_counts_both_sides() -> None:
    ratio = torch.tensor([0.7, 0.81, 1.0, 1.19, 1.3])
    assert losses.outside_clip(ratio.log(), torch.zeros(5), 0.2).tolist() == [True, False, False, False, True]


def test_kl_coefficient_is_bounded_and_survives_bad_numbers() -> None:
    adapt = losses.adapt_kl_coeff
    assert adapt(0.2, 0.0201, 0.01) == pytest.approx(0.3)
    assert adapt(0.2, 0.0049, 0.01) == pytest.approx(0.1)
    assert adapt(0.2, 0.02, 0.01) == adapt(0.2, 0.005, 0.01) == 0.2
    for bad in (math.nan, math.inf, -math.inf):
        assert adapt(0.2, bad, 0.01) == 0.2
    assert adapt(0.0, 1.0, 0.01) == 0.0
    up = down = 0.2
    for _ in range(100):
        up, down = adapt(up, 1.0, 0.01), adapt(down, 0.0, 0.01)
    assert up == 100.0 and down == 1e-4


def test_estimators_of_kl_agree_with_the_exact_one() -> None:
    dist = Categorical(5)
    g = torch.Generator().manual_seed(0)
    old = torch.randn(1, 5, generator=g, dtype=torch.float64)
    new = old + 0.3 * torch.randn(1, 5, generator=g, dtype=torch.float64)
    actions = torch.arange(5).unsqueeze(1)
    before, after = (dist.log_prob(x.expand(5, -1), actions) for x in (old, new))
    log_ratios, p = losses.log_ratio(after, before), before.exp()
    exact = float(dist.kl(old, new))
    assert float((p * losses.kl_k1(log_ratios)).sum()) == pytest.approx(exact, rel=1e-9)
    assert float((p * losses.kl_k3(log_ratios)).sum()) == pytest.approx(exact, rel=1e-9)
    assert float((p * losses.kl_k2(log_ratios)).sum()) == pytest.approx(exact, rel=0.2)
    assert float(losses.kl_k3(log_ratios).min()) >= 0 > float(losses.kl_k1(log_ratios).min())


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_mean_does_not_read_padding(mask_dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, math.nan], [3.0, 8.0]], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[1, 0], [1, 1]]).to(mask_dtype)
    mean = losses.masked_mean(values, mask)
    mean.backward()
    assert float(mean.detach()) == 4.0 and mean.dtype == torch.float64
    torch.testing.assert_close(values.grad, torch.tensor([[1, 0], [1, 1]], dtype=torch.float64) / 3)
    assert float(losses.masked_mean(values.detach(), mask, count=12)) == 1.0
    assert float(losses.masked_mean(values.detach(), torch.zeros_like(mask))) == 0.0
    assert float(losses.masked_mean(torch.zeros(0))) == 0.0


def test_explained_variance() -> None:
    targets = rows(1)
    assert losses.explained_variance(targets, targets) == 1.0
    assert losses.explained_variance(targets + 5, targets) == pytest.approx(1.0)
    assert losses.explained_variance(torch.full_like(targets, 3.0), targets) == pytest.approx(0.0)
    assert losses.explained_variance(-targets, targets) == pytest.approx(-3.0)
    assert math.isnan(losses.explained_variance(targets[:0], targets[:0]))


def test_effective_sample_size() -> None:
    assert losses.effective_sample_size(torch.full((7,), 0.3)) == pytest.approx(1.0)
    assert losses.effective_sample_size(torch.tensor([0.0, 0.0, 5.0, 0.0])) == 0.25


def test_shapes_that_would_broadcast_are_refused() -> None:
    flat, column = torch.zeros(4), torch.zeros(4, 1)
    for call in (
        lambda: losses.log_ratio(flat, column),
        lambda: losses.clipped_policy_loss(flat, flat, column, 0.2),
        lambda: losses.clipped_policy_loss(flat, flat, flat, column),
        lambda: losses.clipped_policy_loss(flat, flat, flat, 0.2, column),
        lambda: losses.value_loss(column, flat),
        lambda: losses.masked_mean(column, flat),
        lambda: losses.explained_variance(column, flat),
    ):
        with pytest.raises(ValueError, match="shapes must be equal"):
            call()
    assert losses.value_loss(column, column).shape == (4, 1)


def test_what_value_clipping_does_to_the_gradient() -> None:
    targets, old = torch.zeros(3), torch.tensor([1.0, 5.0, -1.0])
    values = torch.tensor([1.05, 5.0, -0.5], requires_grad=True)
    gradients = {}
    for vf_clip in ("none", "clamped_error", "clipped_value"):
        rows = losses.value_loss(values, targets, old, vf_clip=vf_clip, clip=0.1 if vf_clip == "clipped_value" else 10)
        gradients[vf_clip] = torch.autograd.grad(rows.sum(), values)[0]
    torch.testing.assert_close(gradients["none"], 2 * values.detach())
    assert gradients["clamped_error"][1] == 0  # 25 > 10: a large error teaches nothing
    torch.testing.assert_close(gradients["clamped_error"][[0, 2]], gradients["none"][[0, 2]])
    # The last value has moved towards its target by more than 0.1 already: it is not pushed further.
    assert gradients["clipped_value"][2] == 0 and gradients["clipped_value"][0] != 0
    with pytest.raises(ValueError, match="old_values"):
        losses.value_loss(values, targets, vf_clip="clipped_value")


def test_the_target_centre_is_the_target_until_the_cap_acts() -> None:
    target, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, 2.0])
    torch.testing.assert_close(losses.target_centre(target, behaviour, 2.0), torch.tensor([-1.0, 2.0 - math.log(2)]))
