from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tetherl.ops.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
)

KINDS: dict[str, Distribution] = {
    "categorical": Categorical(4),
    "one choice": Categorical(1),
    "equal parts": MultiCategorical([2] * 9),
    "unequal parts": MultiCategorical([3, 1, 5]),
    "bits": Bernoulli(3),
    "gaussian": DiagGaussian(3),
    "squashed": SquashedGaussian([-1.0, 0.0], [1.0, 10.0]),
}
DISCRETE = ["categorical", "equal parts", "unequal parts", "bits"]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs_for(dist: Distribution, rows: int = 6, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, dist.inputs_size, generator=rng(seed), dtype=dtype)


def random_mask(dist: Distribution, rows: int, seed: int = 0) -> Tensor:
    """Each part keeps at least its first choice."""
    mask = torch.rand(rows, dist.inputs_size, generator=rng(seed)) < 0.5
    if isinstance(dist, MultiCategorical):
        mask[:, np.cumsum([0, *dist.nvec[:-1]])] = True
    return mask


def all_actions(dist: Distribution) -> Tensor:
    sizes = dist.nvec if isinstance(dist, MultiCategorical) else [2] * dist.action_width
    return torch.tensor(list(itertools.product(*map(range, sizes))))


def plain_probability(dist: Distribution, row: list[float], action: list[int], mask: list[bool]) -> float:
    """The product of exp/Σexp over the parts, one number at a time."""
    total, start = 1.0, 0
    sizes = dist.nvec if isinstance(dist, MultiCategorical) else [2] * dist.action_width
    for part, (n, a) in enumerate(zip(sizes, action, strict=True)):
        if isinstance(dist, Bernoulli):
            weights = [1.0, math.exp(row[part]) if mask[part] else 0.0]
        else:
            allowed = mask[start : start + n]
            weights = [math.exp(x) * ok for x, ok in zip(row[start : start + n], allowed, strict=True)]
            start += n
        total *= weights[a] / sum(weights)
    return total


# ---- the numbers


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", DISCRETE)
def test_golden_enumeration_of_all_joint_actions(kind: str, masked: bool) -> None:
    """Probabilities, entropy and KL against sums over every joint action, written from the definition."""
    dist = KINDS[kind]
    p, q, actions = inputs_for(dist, 3, 1), inputs_for(dist, 3, 2), all_actions(dist)
    mask = random_mask(dist, 3) if masked else None
    for row in range(3):
        allowed = [True] * dist.inputs_size if mask is None else mask[row].tolist()
        joint = {
            name: [plain_probability(dist, x[row].tolist(), a, allowed) for a in actions.tolist()]
            for name, x in {"p": p, "q": q}.items()
        }
        rows = p[row].expand(len(actions), -1)
        row_mask = None if mask is None else mask[row].expand(len(actions), -1)
        probs = dist.log_prob(rows, actions, row_mask).exp()
        torch.testing.assert_close(probs, torch.tensor(joint["p"], dtype=torch.float64), rtol=1e-9, atol=0)
        entropy = -math.fsum(a * math.log(a) for a in joint["p"] if a > 0)
        kl = math.fsum(a * math.log(a / b) for a, b in zip(joint["p"], joint["q"], strict=True) if a > 0)
        one = slice(row, row + 1)
        row_mask = None if mask is None else mask[one]
        assert float(dist.entropy(p[one], row_mask)) == pytest.approx(entropy, rel=1e-9, abs=1e-12)
        assert float(dist.kl(p[one], q[one], row_mask)) == pytest.approx(kl, rel=1e-9, abs=1e-12)
        best = actions[int(np.argmax(joint["p"]))]
        assert torch.equal(dist.mode(p[one], row_mask)[0], best)


def test_golden_gaussian_by_quadrature() -> None:
    """Density, entropy and KL of one normal against integrals over a fine grid."""
    dist = DiagGaussian(1)
    p, q = torch.tensor([[0.3, -0.4]], dtype=torch.float64), torch.tensor([[-0.2, 0.1]], dtype=torch.float64)
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64).unsqueeze(1)
    step = float(x[1] - x[0])
    log_p, log_q = (dist.log_prob(inputs.expand(len(x), -1), x) for inputs in (p, q))
    density = np.exp(-0.5 * ((x[:, 0].numpy() - 0.3) / np.exp(-0.4)) ** 2) / (np.exp(-0.4) * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(log_p.exp().numpy(), density, rtol=1e-9)
    assert float(log_p.exp().sum() * step) == pytest.approx(1, rel=1e-9)
    assert float(dist.entropy(p)) == pytest.approx(float(-(log_p.exp() * log_p).sum() * step), rel=1e-9)
    kl = float((log_p.exp() * (log_p - log_q)).sum() * step)
    assert float(dist.kl(p, q)) == pytest.approx(kl, rel=1e-9)


def test_squashed_density_integrates_to_one_over_the_bounds() -> None:
    dist = SquashedGaussian([-2.0], [6.0])
    inputs = torch.tensor([[0.4, -0.3]], dtype=torch.float64)
    y = torch.linspace(-2, 6, 400_003, dtype=torch.float64)[1:-1].unsqueeze(1)
    u = torch.atanh((y + 2) / 4 - 1)
    torch.testing.assert_close(dist.to_bounds(u), y)
    log_density = dist.log_prob(inputs.expand(len(u), -1), u)
    step = float(y[1, 0] - y[0, 0])
    assert float(log_density.exp().sum() * step) == pytest.approx(1, rel=1e-6)
    entropy = float(-(log_density.exp() * log_density).sum() * step)
    assert float(dist.entropy(inputs)) == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_zero_for_equals_and_positive_otherwise(kind: str) -> None:
    dist = KINDS[kind]
    p, q = inputs_for(dist, 50, 1), inputs_for(dist, 50, 2)
    assert float(dist.kl(p, p).abs().max()) < 1e-12
    if kind != "one choice":
        assert float(dist.kl(p, q).min()) > 0
        assert not torch.allclose(dist.kl(p, q), dist.kl(q, p))


# ---- sampling


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", DISCRETE)
def test_frequencies_of_joint_actions_follow_the_probabilities(kind: str, masked: bool) -> None:
    dist, n = KINDS[kind], 100_000
    row = inputs_for(dist, 1, 3, torch.float32)
    mask = random_mask(dist, 1, 5) if masked else None
    rows = row.expand(n, -1)
    drawn = dist.sample(rows, rng(7), None if mask is None else mask.expand(n, -1))
    actions = all_actions(dist)
    log_probs = dist.log_prob(
        row.expand(len(actions), -1), actions, None if mask is None else mask.expand(len(actions), -1)
    )
    probs = log_probs.double().exp().numpy()
    scale = np.array([*np.cumprod((actions.max(0).values + 1).numpy()[::-1])[::-1][1:], 1])
    counts = np.bincount(drawn.numpy() @ scale, minlength=len(actions))
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    deviation = np.abs(counts - n * probs) / np.sqrt(n * probs * (1 - probs) + 1e-9)
    assert deviation[probs > 0].max() < 5
    assert counts[probs == 0].sum() == 0


def test_normal_samples_have_the_given_moments_and_are_independent() -> None:
    dist, n = DiagGaussian(2), 200_000
    inputs = torch.tensor([[1.0, -2.0, math.log(0.5), math.log(3.0)]]).expand(n, -1)
    x = dist.sample(inputs, rng(1)).double()
    sigma = torch.tensor([0.5, 3.0], dtype=torch.float64)
    assert torch.all((x.mean(0) - torch.tensor([1.0, -2.0])).abs() < 5 * sigma / math.sqrt(n))
    assert torch.all((x.std(0) / sigma - 1).abs() < 5 / math.sqrt(2 * n))
    assert abs(float(torch.corrcoef(x.T)[0, 1])) < 5 / math.sqrt(n)
    entropy = -dist.log_prob(inputs, x.float()).mean()
    assert float(entropy) == pytest.approx(float(dist.entropy(inputs[:1])), abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: str) -> None:
    dist = KINDS[kind]
    inputs = inputs_for(dist, 64, 1, torch.float32)
    first, again, other = (dist.sample(inputs, rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert kind == "one choice" or not torch.equal(first, other)
    state = torch.get_rng_state()
    dist.sample(inputs, rng(1))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_with_log_prob_says_the_same_as_the_single_calls(kind: str, dtype: torch.dtype) -> None:
    dist = KINDS[kind]
    inputs = inputs_for(dist, 64, 1, dtype)
    actions, logp = dist.sample_with_log_prob(inputs, rng(4))
    assert torch.equal(actions, dist.sample(inputs, rng(4)))
    assert torch.equal(logp, dist.log_prob(inputs, actions))
    best, best_logp = dist.mode_with_log_prob(inputs)
    assert torch.equal(best, dist.mode(inputs))
    torch.testing.assert_close(best_logp, dist.log_prob(inputs, best))
    for x in (actions, best):
        assert x.shape == (64, dist.action_width)
        assert x.dtype == (torch.int64 if dist.action_dtype == torch.int64 else dtype)
    others = dist.entropy(inputs), dist.kl(inputs, inputs)
    assert all(x.dtype == dtype and x.shape == (64,) for x in (logp, best_logp, *others))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_no_impossible_choice_even_at_the_ends_of_the_unit_interval(
    uniform: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist = MultiCategorical([7, 4])
    inputs = inputs_for(dist, 500, 9, torch.float32)
    mask = random_mask(dist, 500, 3)
    mask[:, 0] = mask[:, 6] = mask[:, 7] = mask[:, 10] = False
    mask[:, 3] = mask[:, 8] = True
    monkeypatch.setattr(torch, "rand", lambda size, **kw: torch.full(size, uniform, dtype=kw["dtype"]))
    drawn = dist.sample(inputs, rng(), mask)
    assert torch.all(mask.gather(1, drawn + torch.tensor([0, 7])))
    narrow = dist.sample(inputs, rng())  # without a mask, the filling of the shorter part must not be drawn
    assert int(narrow[:, 1].max()) < 4
    logits = torch.tensor([[0.0, -200.0]])  # a probability that underflows to 0
    assert int(Categorical(2).sample(logits, rng())) == 0


# ---- masks


@pytest.mark.parametrize("kind", DISCRETE)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.int8, torch.float32])
def test_masks_of_any_dtype_and_poison_under_them(kind: str, mask_dtype: torch.dtype) -> None:
    dist = KINDS[kind]
    p, q, mask = inputs_for(dist, 20, 1), inputs_for(dist, 20, 2), random_mask(dist, 20)
    actions = dist.sample(p, rng(), mask)
    clean = [dist.log_prob(p, actions, mask), dist.entropy(p, mask), dist.kl(p, q, mask)]
    for poison in (math.nan, math.inf, -math.inf, 1e300):
        p_bad, q_bad = (x.masked_fill(~mask, poison).requires_grad_() for x in (p, q))
        given = mask.to(mask_dtype)
        dirty = [
            dist.log_prob(p_bad, actions, given),
            dist.entropy(p_bad, given),
            dist.kl(p_bad, q_bad, given),
        ]
        for a, b in zip(dirty, clean, strict=True):
            assert torch.equal(a, b)
        torch.stack(dirty).sum().backward()
        for x in (p_bad, q_bad):
            assert x.grad is not None and torch.all(torch.isfinite(x.grad)) and torch.all(x.grad[~mask] == 0)
        assert torch.equal(dist.mode(p_bad, given), dist.mode(p, mask))
        assert torch.equal(dist.sample(p_bad, rng(), given), actions)


def test_one_valid_choice_has_entropy_and_gradients_of_exactly_zero() -> None:
    dist = MultiCategorical([3, 4])
    p, q = inputs_for(dist, 5, 1).requires_grad_(), inputs_for(dist, 5, 2).requires_grad_()
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[:, 2] = mask[:, 4] = True
    action = torch.tensor([[2, 1]]).expand(5, -1)
    values = [dist.log_prob(p, action, mask), dist.entropy(p, mask), dist.kl(p, q, mask)]
    assert all(torch.all(v == 0) for v in values)
    torch.stack(values).sum().backward()
    for x in (p, q):
        assert x.grad is not None and torch.all(x.grad == 0)
    assert torch.equal(dist.sample(p.detach(), rng(), mask), action)


def test_a_mask_that_forbids_everything_is_refused() -> None:
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[2, 3:] = False
    with pytest.raises(ValueError, match="part 1 in row 2"):
        MultiCategorical([3, 5]).sample(torch.zeros(3, 8), rng(), mask)
    mask[2, 7] = True
    assert int(MultiCategorical([3, 5]).sample(torch.zeros(3, 8), rng(), mask)[2, 1]) == 4
    with pytest.raises(ValueError, match="cannot be masked"):
        DiagGaussian(1).mode(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))


# ---- gradients and extremes


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_function(kind: str) -> None:
    dist = KINDS[kind]
    p, q = (inputs_for(dist, 3, seed).requires_grad_() for seed in (1, 2))
    actions = dist.sample(p.detach(), rng())
    assert torch.autograd.gradcheck(lambda x: dist.log_prob(x, actions), p)
    assert torch.autograd.gradcheck(dist.entropy, p)
    assert torch.autograd.gradcheck(dist.kl, (p, q))


@pytest.mark.parametrize("kind", DISCRETE)
def test_extreme_logits_stay_finite(kind: str) -> None:
    dist = KINDS[kind]
    p, q = (inputs_for(dist, 20, seed, torch.float32) * 500 for seed in (1, 2))
    p.requires_grad_(), q.requires_grad_()
    values = [dist.log_prob(p, dist.mode(q)), dist.entropy(p), dist.kl(p, q)]
    torch.stack(values).sum().backward()
    for x in (*values, p.grad, q.grad):
        assert x is not None and torch.all(torch.isfinite(x))


def test_bits_that_are_almost_sure_keep_their_small_probability() -> None:
    logits = torch.tensor([[22.0]], dtype=torch.float64)
    logp = float(Bernoulli(1).log_prob(logits, torch.tensor([[1]])))
    assert logp == pytest.approx(-math.exp(-22), rel=1e-3)


def test_ties_go_to_the_lowest_index() -> None:
    assert Categorical(4).mode(torch.tensor([[1.0, 3.0, 3.0, 0.0]])).tolist() == [[1]]
    assert MultiCategorical([2] * 3).mode(torch.zeros(1, 6)).tolist() == [[0, 0, 0]]
    assert MultiCategorical([2, 3]).mode_with_log_prob(torch.zeros(1, 5))[0].tolist() == [[0, 0]]
    assert Bernoulli(2).mode(torch.tensor([[0.0, 1e-6]])).tolist() == [[0, 1]]


def test_log_std_is_clamped() -> None:
    dist = DiagGaussian(1)
    low, high = torch.tensor([[0.0, -50.0]]), torch.tensor([[0.0, 50.0]])
    assert torch.equal(dist.entropy(low), dist.entropy(torch.tensor([[0.0, -20.0]])))
    assert torch.equal(dist.entropy(high), dist.entropy(torch.tensor([[0.0, 2.0]])))
    assert not torch.equal(dist.entropy(high), dist.entropy(torch.tensor([[0.0, 1.9]])))


def test_slices_of_a_larger_output_are_fine() -> None:
    """The head's output may be wider than the distribution's inputs."""
    for kind in KINDS:
        dist = KINDS[kind]
        wide = inputs_for(dist, 5, 1)
        wide = torch.cat([wide, torch.full((5, 2), math.nan)], 1)[:, : dist.inputs_size]
        assert torch.equal(dist.entropy(wide), dist.entropy(wide.clone()))
        assert torch.equal(dist.sample(wide, rng()), dist.sample(wide.clone(), rng()))
        columns = inputs_for(dist, 5, 1).T.contiguous().T
        assert torch.equal(dist.sample(columns, rng()), dist.sample(columns.contiguous(), rng()))


# ---- shapes


@pytest.mark.parametrize("kind", KINDS)
def test_other_shapes_are_refused(kind: str) -> None:
    dist = KINDS[kind]
    inputs = inputs_for(dist)
    actions = dist.sample(inputs, rng())
    assert dist.log_prob(inputs, actions).shape == (6,)
    for bad in (inputs[0], inputs[:, :-1], torch.cat([inputs, inputs], 1), inputs[None]):
        with pytest.raises(ValueError, match="needs inputs"):
            dist.sample(bad, rng())
        with pytest.raises(ValueError, match="needs inputs"):
            dist.entropy(bad)
    for wrong in (actions[:, 0], actions[:-1], actions[None], torch.cat([actions, actions], 1)):
        with pytest.raises(ValueError, match="needs actions"):
            dist.log_prob(inputs, wrong)
    if dist.action_dtype == torch.int64:
        with pytest.raises(ValueError, match="mask has shape"):
            dist.entropy(inputs, torch.ones(6, dtype=torch.bool))


def test_impossible_sizes_are_refused() -> None:
    for nvec in ([], [3, 0]):
        with pytest.raises(ValueError, match="at least one"):
            MultiCategorical(nvec)
    for low, high in (([0.0], [0.0]), ([0.0], [math.inf]), ([0.0, 1.0], [1.0])):
        with pytest.raises(ValueError):
            SquashedGaussian(low, high)
