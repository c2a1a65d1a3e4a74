from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tetherl.ops.gae import gae
from tetherl.ops.vtrace import vtrace

CASES = {
    case["name"]: case for case in json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["cases"]
}
GOLDEN = [
    "vtrace_01_on_policy_nstep",
    "vtrace_02_on_policy_equals_gae",
    "vtrace_03_clipped",
    "vtrace_04_rho_bar2",
    "vtrace_05_terminal_and_truncated_inside",
    "vtrace_06_unclipped_is",
]


def f64(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", GOLDEN)
def test_vtrace_golden(name: str) -> None:
    given, expected = CASES[name]["inputs"], CASES[name]["expected"]
    rows = [f64(given[key]).unsqueeze(1) for key in ("log_rhos", "rewards", "values", "next_values")]
    terminated, truncated = (torch.tensor(given[key]).unsqueeze(1) for key in ("terminated", "truncated"))
    caps = {key: given[key] for key in ("rho_bar", "c_bar", "pg_rho_bar")}
    vs, pg = vtrace(*rows, terminated, terminated | truncated, given["gamma"], given["lam"], **caps)
    close(vs[:, 0], f64(expected["vs"]))
    close(pg[:, 0], f64(expected["pg_advantages"]))


def definition(
    log_rhos: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    lam: float,
    caps: tuple[float, float, float],
) -> tuple[Tensor, Tensor]:
    """vs[s] = V[s] + Σ_{t≥s} γ^{t-s} (Π_{s≤i<t} c[i]) δ[t], the sum ending with the first `done`; pg with the vs of
    the row after, where there is one in the same episode. Plain numbers, one row at a time."""
    length, width = rewards.shape
    vs, pg = torch.zeros(length, width, dtype=torch.float64), torch.zeros(length, width, dtype=torch.float64)
    for b in range(width):
        rho = [math.exp(float(x)) for x in log_rhos[:, b]]
        boot = [0.0 if terminated[t, b] else float(next_values[t, b]) for t in range(length)]
        v, r = values[:, b].tolist(), rewards[:, b].tolist()
        for s in range(length):
            terms = [v[s]]
            for t in range(s, length):
                trace = math.prod(lam * min(caps[1], rho[i]) for i in range(s, t))
                terms.append(gamma ** (t - s) * trace * min(caps[0], rho[t]) * (r[t] + gamma * boot[t] - v[t]))
                if done[t, b]:
                    break
            vs[s, b] = math.fsum(terms)
        for s in range(length):
            goes_on = s + 1 < length and not done[s, b]
            following = lam * float(vs[s + 1, b]) + (1 - lam) * v[s + 1] if goes_on else boot[s]
            pg[s, b] = min(caps[2], rho[s]) * (r[s] + gamma * following - v[s])
    return vs, pg


def random_case(seed: int, length: int = 19, width: int = 4) -> tuple[Tensor, ...]:
    """Off-policy, with both kinds of ends inside; next_values agree with values where the episode goes on."""
    g = torch.Generator().manual_seed(seed)
    log_rhos, rewards, values, nexts = (torch.randn(length, width, generator=g, dtype=torch.float64) for _ in range(4))
    terminated = torch.rand(length, width, generator=g) < 0.15
    done = terminated | (torch.rand(length, width, generator=g) < 0.15)
    done[-1] = True
    nexts[:-1] = torch.where(done[:-1], nexts[:-1], values[1:])
    return log_rhos, rewards, values, nexts, terminated, done


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("caps", [(1.0, 1.0, 1.0), (2.0, 1.0, 1.5), (math.inf, 0.5, 1.0)])
def test_vtrace_is_the_double_sum_of_its_definition(seed: int, lam: float, caps: tuple[float, float, float]) -> None:
    case = random_case(seed)
    vs, pg = vtrace(*case, 0.97, lam, rho_bar=caps[0], c_bar=caps[1], pg_rho_bar=caps[2])
    expected_vs, expected_pg = definition(*case, 0.97, lam, caps)
    close(vs, expected_vs)
    close(pg, expected_pg)


@pytest.mark.parametrize("lam", [1.0, 0.8, 0.0])
def test_on_policy_it_is_gae(lam: float) -> None:
    log_rhos, *rest = random_case(3)
    vs, pg = vtrace(torch.zeros_like(log_rhos), *rest, 0.95, lam)
    advantages, targets = gae(*rest, 0.95, lam)
    close(vs, targets)
    close(pg, advantages)


def test_on_policy_without_lambda_it_is_the_return() -> None:
    log_rhos, rewards, values, nexts, terminated, done = random_case(4)
    vs, _ = vtrace(torch.zeros_like(log_rhos), rewards, values, nexts, terminated, done, 0.9)
    for b in range(rewards.shape[1]):
        future = 0.0
        for t in reversed(range(len(rewards))):
            if done[t, b]:
                future = 0.0 if terminated[t, b] else float(nexts[t, b])
            future = float(rewards[t, b]) + 0.9 * future
            assert float(vs[t, b]) == pytest.approx(future, rel=1e-9)


def test_two_trajectories_in_one_batch_are_the_two_apart() -> None:
    case = random_case(5, length=12, width=2)
    vs, pg = vtrace(*case, 0.9, 0.95)
    for b in range(2):
        alone = vtrace(*(x[:, b : b + 1] for x in case), 0.9, 0.95)
        assert torch.equal(alone[0][:, 0], vs[:, b]) and torch.equal(alone[1][:, 0], pg[:, b])
    assert not torch.equal(vs[:, 0], vs[:, 1])
    # One after the other in one column: the first ends, so nothing of the second gets into it.
    columns = vtrace(*(torch.cat([x[:, :1], x[:, 1:]]) for x in case), 0.9, 0.95)
    close(columns[0][:, 0], torch.cat([vs[:, 0], vs[:, 1]]))
    close(columns[1][:, 0], torch.cat([pg[:, 0], pg[:, 1]]))


def test_at_a_truncation_the_next_value_is_that_of_the_final_observation() -> None:
    log_rhos, rewards, values, nexts, terminated, _ = (x[:2] for x in random_case(6))
    terminated = torch.zeros_like(terminated)
    done = torch.tensor([[True] * 4, [True] * 4])
    _, pg = vtrace(log_rhos, rewards, values, nexts, terminated, done, 0.9)
    close(pg[0], log_rhos[0].exp().clamp(max=1) * (rewards[0] + 0.9 * nexts[0] - values[0]))
    vs, _ = vtrace(log_rhos, rewards, values, nexts, terminated, done, 0.9)
    wrong = log_rhos[0].exp().clamp(max=1) * (rewards[0] + 0.9 * vs[1] - values[0])
    assert not torch.allclose(pg[0], wrong)


@pytest.mark.parametrize("poison", [1e30, math.nan, math.inf])
def test_padding_of_vtrace_changes_nothing(poison: float) -> None:
    case = random_case(7, length=9, width=3)
    lengths = [9, 5, 1]
    mask = torch.arange(9).unsqueeze(1) < torch.tensor(lengths)
    padded = [torch.where(mask, x, poison) for x in case[:4]]
    vs, pg = vtrace(*padded, *(torch.where(mask, x, True) for x in case[4:]), 0.95, 0.9, mask=mask)
    assert torch.all(vs[~mask] == 0) and torch.all(pg[~mask] == 0)
    for b, n in enumerate(lengths):
        alone = vtrace(*(x[:n, b : b + 1] for x in case), 0.95, 0.9)
        assert torch.equal(alone[0][:, 0], vs[:n, b]) and torch.equal(alone[1][:, 0], pg[:n, b])


def test_no_gradient_flows_and_the_dtype_is_kept() -> None:
    log_rhos, rewards, values, *rest = (x.float() if x.is_floating_point() else x for x in random_case(8))
    vs, pg = vtrace(log_rhos.requires_grad_(), rewards, values.requires_grad_(), *rest, 0.9)
    assert vs.dtype == pg.dtype == torch.float32
    assert not vs.requires_grad and not pg.requires_grad


def test_vtrace_refuses_what_it_cannot_mean() -> None:
    case = random_case(9)
    with pytest.raises(ValueError, match="rho_bar"):
        vtrace(*case, 0.9, rho_bar=0.5)
    for position in range(6):
        wrong = list(case)
        wrong[position] = wrong[position].unsqueeze(-1)
        with pytest.raises(ValueError, match=r"\[T, B\]"):
            vtrace(*wrong, 0.9)
