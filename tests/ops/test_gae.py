from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tetherl.ops.gae import gae


def double_sum(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """The definition: A[t] = Σ_k (γλ)^k δ[t+k], the sum ending with the first `done`."""
    length, width = rewards.shape
    out = torch.zeros(length, width, dtype=torch.float64)
    for b in range(width):
        for t in range(length):
            terms = []
            for k in range(t, length):
                bootstrap = 0.0 if terminated[k, b] else gamma * float(next_values[k, b])
                terms.append((gamma * lam) ** (k - t) * (float(rewards[k, b]) + bootstrap - float(values[k, b])))
                if done[k, b]:
                    break
            out[t, b] = math.fsum(terms)
    return out


def random_case(seed: int, length: int = 23, width: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    rewards, values, nexts = (torch.randn(length, width, generator=g, dtype=torch.float64) for _ in range(3))
    terminated = torch.rand(length, width, generator=g) < 0.15
    truncated = torch.rand(length, width, generator=g) < 0.15
    return rewards, values, nexts, terminated, terminated | truncated


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0)])
def test_golden_rule_of_the_paper(seed: int, gamma: float, lam: float) -> None:
    case = random_case(seed)
    advantages, targets = gae(*case, gamma, lam)
    expected = double_sum(*case, gamma, lam)
    torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(targets, expected + case[1], rtol=1e-9, atol=1e-12)


def test_a_truncation_is_not_a_termination() -> None:
    """Reward 1 for ever: V = 1/(1-γ). The right treatment keeps it, the wrong one does not."""
    gamma, length = 0.9, 10
    value = torch.full((length, 1), 1 / (1 - gamma), dtype=torch.float64)
    rewards, never = torch.ones_like(value), torch.zeros(length, 1, dtype=torch.bool)
    last = never.clone()
    last[-1] = True
    _, right = gae(rewards, value, value, never, last, gamma, 1.0)
    _, wrong = gae(rewards, value, value, last, last, gamma, 1.0)
    torch.testing.assert_close(right, value)
    assert wrong[0, 0] == pytest.approx((1 - gamma**length) / (1 - gamma))


def test_termination_wins_without_done() -> None:
    rewards, values, nexts, terminated, done = random_case(3)
    forgotten, _ = gae(rewards, values, nexts, terminated, done & ~terminated, 0.9, 0.8)
    given, _ = gae(rewards, values, nexts, terminated, done, 0.9, 0.8)
    torch.testing.assert_close(forgotten, given, rtol=0, atol=0)


@pytest.mark.parametrize("poison", [1e30, math.nan, math.inf])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_changes_nothing(poison: float, mask_dtype: torch.dtype) -> None:
    case = random_case(4, length=9, width=3)
    lengths = [9, 5, 1]
    mask = torch.arange(9).unsqueeze(1) < torch.tensor(lengths)
    clean, _ = gae(*case, 0.95, 0.9, mask)
    padded = [torch.where(mask, x, poison) for x in case[:3]]
    flags = [torch.where(mask, x, True) for x in case[3:]]
    advantages, targets = gae(*padded, *flags, 0.95, 0.9, mask.to(mask_dtype))
    assert torch.equal(advantages, clean)
    assert torch.all(advantages[~mask] == 0) and torch.all(targets[~mask] == 0)
    for b, n in enumerate(lengths):
        alone, _ = gae(*(x[:n, b : b + 1] for x in case), 0.95, 0.9)
        assert torch.equal(alone[:, 0], advantages[:n, b])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_nothing_has_a_gradient(dtype: torch.dtype) -> None:
    rewards, values, nexts, terminated, done = random_case(5)
    values = values.to(dtype).requires_grad_()
    for flags in (
        (terminated, done),
        (terminated.long(), done.long()),
        (terminated.to(dtype), done.to(dtype)),
    ):
        advantages, targets = gae(rewards.to(dtype), values, nexts.to(dtype), *flags, 0.99, 0.95)
        assert advantages.dtype == targets.dtype == dtype
        assert not advantages.requires_grad and not targets.requires_grad


@pytest.mark.parametrize("position", range(5))
def test_other_shapes_are_refused(position: int) -> None:
    case = list(random_case(6))
    case[position] = case[position].unsqueeze(-1)
    with pytest.raises(ValueError, match=r"\[T, B\]"):
        gae(*case, 0.99, 0.95)
    flat = [x[:, 0] for x in random_case(6)]
    with pytest.raises(ValueError, match=r"\[T, B\]"):
        gae(*flat, 0.99, 0.95)
    with pytest.raises(ValueError, match="mask"):
        gae(*random_case(6), 0.99, 0.95, torch.ones(23, dtype=torch.bool))
