from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tetherl.ops.composite import Composite
from tetherl.ops.distributions import Bernoulli, Categorical, DiagGaussian, MultiCategorical, SquashedGaussian

CASES = {
    case["name"]: case for case in json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["cases"]
}


def f64(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ["dist_tuple_01"])
def test_composite_golden(name: str) -> None:
    expected = CASES[name]["expected"]
    cat, gauss, bits = (CASES[part]["inputs"] for part in CASES[name]["inputs"]["parts"])
    dist = Composite([Categorical(3), DiagGaussian(2), Bernoulli(3)])

    def inputs(x: str) -> Tensor:
        std = [math.log(s) for s in gauss[f"std_{x}"]]
        return f64([[*cat[f"logits_{x}"], *gauss[f"mean_{x}"], *std, *bits[f"logits_{x}"]]])

    action = f64([[cat["action"], *gauss["action"], *bits["action"]]])
    got = [dist.kl(inputs("p"), inputs("q")), dist.entropy(inputs("p")), dist.log_prob(inputs("p"), action)]
    for value, key in zip(got, ("kl_pq", "entropy_p", "logp_p_action"), strict=True):
        torch.testing.assert_close(value, f64([expected[key]]), rtol=1e-9, atol=1e-12)


PARTS = [MultiCategorical([3, 2]), SquashedGaussian([-1.0], [3.0]), Bernoulli(2), DiagGaussian(2), Categorical(4)]


def test_parts_do_not_notice_each_other() -> None:
    dist = Composite(PARTS)
    assert (dist.inputs_size, dist.action_width) == (5 + 2 + 2 + 4 + 4, 2 + 1 + 2 + 2 + 1)
    p, q = (torch.randn(7, dist.inputs_size, generator=rng(seed)) for seed in (1, 2))
    actions, logp = dist.sample_with_log_prob(p, rng(3))
    best, best_logp = dist.mode_with_log_prob(p)
    assert actions.dtype == torch.float32 and actions.shape == (7, 8)
    sums = {key: torch.zeros(7) for key in ("logp", "best", "entropy", "bonus", "kl")}
    column = at = 0
    for part in PARTS:
        own_p, own_q = p[:, at : at + part.inputs_size], q[:, at : at + part.inputs_size]
        own = actions[:, column : column + part.action_width].to(part.action_dtype)
        mode = best[:, column : column + part.action_width].to(part.action_dtype)
        torch.testing.assert_close(mode, part.mode(own_p), rtol=0, atol=0)
        sums["logp"] += part.log_prob(own_p, own)
        sums["best"] += part.log_prob(own_p, mode)
        sums["entropy"] += part.entropy(own_p)
        sums["bonus"] += part.sampled_entropy(own_p, own)
        sums["kl"] += part.kl(own_p, own_q)
        at, column = at + part.inputs_size, column + part.action_width
    torch.testing.assert_close(logp, sums["logp"])
    torch.testing.assert_close(dist.log_prob(p, actions), sums["logp"])
    torch.testing.assert_close(best_logp, sums["best"])
    torch.testing.assert_close(dist.entropy(p), sums["entropy"])
    torch.testing.assert_close(dist.sampled_entropy(p, actions), sums["bonus"])
    torch.testing.assert_close(dist.kl(p, q), sums["kl"])


def test_samples_of_parts_follow_their_own_probabilities() -> None:
    dist = Composite([Categorical(2), Bernoulli(1), DiagGaussian(1)])
    row = torch.tensor([[0.0, math.log(3), -1.0, 2.0, math.log(0.5)]]).expand(50_000, -1)
    actions = dist.sample(row, rng())
    assert float(actions[:, 0].mean()) == pytest.approx(0.75, abs=0.01)
    assert float(actions[:, 1].mean()) == pytest.approx(1 / (1 + math.e), abs=0.01)
    assert float(actions[:, 2].mean()) == pytest.approx(2.0, abs=0.01)
    assert float(actions[:, 2].std()) == pytest.approx(0.5, abs=0.01)
    corner = torch.corrcoef(actions.T)
    assert float((corner - torch.eye(3)).abs().max()) < 0.02


def test_what_a_composite_refuses() -> None:
    dist = Composite(PARTS)
    p = torch.zeros(2, dist.inputs_size)
    with pytest.raises(ValueError, match="no mask"):
        dist.sample(p, rng(), torch.ones_like(p, dtype=torch.bool))
    with pytest.raises(ValueError, match="inputs"):
        dist.entropy(p[:, 1:])
    with pytest.raises(ValueError, match="actions"):
        dist.log_prob(p, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="part"):
        Composite([])


# ---- the entropy bonus of squashed normals


def test_the_sampled_entropy_is_right_on_average_with_its_gradient() -> None:
    """Against quadrature, which is exact: value and gradient, for narrow and wide, centred and shifted normals."""
    dist = SquashedGaussian([-1.0, 0.0], [1.0, 10.0])
    for row in ([0.0, 0.5, -1.0, 0.0], [1.5, -2.0, 0.3, 1.0]):
        one = f64([row]).requires_grad_()
        (exact,) = torch.autograd.grad(dist.entropy(one).sum(), one)
        many = f64([row]).requires_grad_()
        rows = many.expand(200_000, -1)
        actions = dist.sample(rows.detach(), rng(5))
        sampled = dist.sampled_entropy(rows, actions).mean()
        (gradient,) = torch.autograd.grad(sampled, many)
        assert float(sampled.detach()) == pytest.approx(float(dist.entropy(one).detach()), abs=0.02)
        torch.testing.assert_close(gradient, exact, rtol=0.03, atol=0.02)


def test_the_sampled_entropy_of_others_is_their_entropy() -> None:
    for dist in (Categorical(3), Bernoulli(2), DiagGaussian(2)):
        p = torch.randn(4, dist.inputs_size, generator=rng())
        assert torch.equal(dist.sampled_entropy(p, dist.sample(p, rng())), dist.entropy(p))


def test_squashed_numbers_stay_finite_far_out() -> None:
    dist = SquashedGaussian([-1.0], [1.0])
    p = torch.tensor([[0.0, 0.0], [0.0, -20.0], [10.0, 2.0], [-10.0, 2.0]], requires_grad=True)
    for u in (-10.0, 10.0):
        actions = torch.full((4, 1), u)
        for value in (dist.log_prob(p, actions), dist.sampled_entropy(p, actions)):
            assert torch.isfinite(value[[0, 2, 3]]).all()
            (gradient,) = torch.autograd.grad(value[[0, 2, 3]].sum(), p)
            assert torch.isfinite(gradient).all()
        assert torch.isfinite(dist.sampled_entropy(p, actions)).all()
