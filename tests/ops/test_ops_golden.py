"""The published numbers (tests/data/golden.json) that the pure functions must reproduce, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tetherl.ops import losses
from tetherl.ops.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
)
from tetherl.ops.gae import gae
from tetherl.ops.metrics import iqm
from tetherl.ops.normalize import ReturnScaler, RunningMoments, normalize_advantages
from tetherl.ops.schedules import schedule_value

CASES = {
    case["name"]: case for case in json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["cases"]
}

GAE = [
    "gae_01_termination",
    "gae_02_truncation",
    "gae_03_both_flags",
    "gae_04_multi_episode",
    "gae_05_lambda0",
    "gae_06_lambda1",
    "gae_07_time_major_two_envs",
]
PLAIN_DISTRIBUTIONS = [
    "dist_cat_01",
    "dist_cat_02",
    "dist_cat_03_extreme",
    "dist_md_01",
    "dist_md_02_nine_keys",
    "dist_bern_01",
    "dist_bern_02",
    "dist_gauss_01",
    "dist_gauss_02",
]
MASKED = ["dist_cat_04_masked", "dist_cat_05_single_valid"]
SQUASHED = ["dist_squash_01", "dist_squash_02"]


def f64(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def close(actual: Any, expected: Any, rel: float = 1e-9) -> None:
    actual = torch.as_tensor(actual)
    if actual.is_floating_point():
        assert actual.dtype == torch.float64
    torch.testing.assert_close(actual.double(), f64(expected), rtol=rel, atol=1e-12)


def load(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return CASES[name]["inputs"], CASES[name]["expected"]


# ---- estimators


@pytest.mark.parametrize("name", GAE)
def test_gae_golden(name: str) -> None:
    given, expected = load(name)
    column = (lambda x: x) if name == "gae_07_time_major_two_envs" else (lambda x: [[v] for v in x])
    rows = [f64(column(given[key])) for key in ("rewards", "values", "next_values")]
    terminated, truncated = (torch.tensor(column(given[key])) for key in ("terminated", "truncated"))
    advantages, targets = gae(*rows, terminated, terminated | truncated, given["gamma"], given["lam"])
    close(advantages, column(expected["advantages"]))
    close(targets, column(expected["value_targets"]))


@pytest.mark.parametrize("name", ["gae_08_padded_mask"])
@pytest.mark.parametrize("poison", [1e6, math.nan, math.inf])
def test_gae_golden_padding(name: str, poison: float) -> None:
    given, expected = load(name)
    mask = torch.tensor(given["mask"]).T
    rows = [f64(given[key]).T for key in ("rewards", "values", "next_values")]
    rows = [torch.where(mask == 1, x, poison) for x in rows]
    terminated, truncated = (torch.tensor(given[key]).T for key in ("terminated", "truncated"))
    advantages, targets = gae(*rows, terminated, terminated | truncated, given["gamma"], given["lam"], mask)
    close(advantages.T, expected["advantages"])
    assert torch.all(advantages[mask == 0] == 0) and torch.all(targets[mask == 0] == 0)

    valid = advantages[mask == 1]
    moments = RunningMoments()
    moments.update(valid)
    close(moments.mean, expected["mean"])
    close(moments.variance.sqrt(), expected["std"])
    normalized = torch.zeros_like(advantages)
    normalized[mask == 1] = normalize_advantages(valid, given["norm_eps"])
    close(normalized.T, expected["advantages_normalized"])


@pytest.mark.parametrize("name", ["gae_09_client_lost"])
def test_gae_golden_client_lost(name: str) -> None:
    given, expected = load(name)
    values, rewards = f64(given["values_of_obs"]).unsqueeze(1), f64(given["rewards_received"]).unsqueeze(1)
    kept = len(rewards)
    assert kept == expected["transitions_kept"] == given["actions_sent"] - 1
    done = torch.tensor([[False], [False], [True]])
    advantages, targets = gae(
        rewards, values[:kept], values[1:], torch.zeros_like(done), done, given["gamma"], given["lam"]
    )
    close(advantages[:, 0], expected["advantages"])
    close(targets[:, 0], expected["value_targets"])


# ---- distributions


def build(case: dict[str, Any]) -> tuple[Distribution, Tensor, Tensor, Tensor]:
    """The distribution of a case, the inputs of p and q as one row each, and the action row."""
    given, kind = case["inputs"], case["kind"]
    if "gaussian" in kind:
        p, q = (f64([*given[f"mean_{x}"], *map(math.log, given[f"std_{x}"])]) for x in "pq")
        if kind == "squashed_gaussian":
            return (
                SquashedGaussian(given["low"], given["high"]),
                p[None],
                q[None],
                f64([given["pre_tanh_action"]]),
            )
        return DiagGaussian(len(given["mean_p"])), p[None], q[None], f64([given["action"]])
    p, q = f64([given["logits_p"]]), f64([given["logits_q"]])
    action = torch.tensor(given["action"]).reshape(1, -1)
    if kind == "multidiscrete":
        return MultiCategorical(given["nvec"]), p, q, action
    if kind == "bernoulli":
        return Bernoulli(p.shape[1]), p, q, action
    return Categorical(p.shape[1]), p, q, action


@pytest.mark.parametrize("name", PLAIN_DISTRIBUTIONS)
def test_distribution_golden(name: str) -> None:
    expected = CASES[name]["expected"]
    dist, p, q, action = build(CASES[name])
    close(dist.kl(p, q), [expected["kl_pq"]])
    close(dist.entropy(p), [expected["entropy_p"]])
    close(dist.log_prob(p, action), [expected["logp_p_action"]])
    close(dist.mode(p).reshape(-1), torch.tensor(expected["mode"]).reshape(-1).tolist())


@pytest.mark.parametrize("name", MASKED)
def test_masked_distribution_golden(name: str) -> None:
    given, expected = load(name)
    dist, p, q, action = build(CASES[name])
    mask = torch.tensor([given["mask"]])
    each = torch.arange(p.shape[1]).unsqueeze(1)
    probs = dist.log_prob(p.expand(len(each), -1), each, mask.expand(len(each), -1)).exp()
    close(probs, expected["probs_p"])
    assert torch.all(probs[mask[0] == 0] == 0)
    close(dist.kl(p, q, mask), [expected["kl_pq"]])
    close(dist.entropy(p, mask), [expected["entropy_p"]])
    close(dist.log_prob(p, action, mask), [expected["logp_p_action"]])


@pytest.mark.parametrize("name", SQUASHED)
def test_squashed_distribution_golden(name: str) -> None:
    expected = CASES[name]["expected"]
    dist, p, q, action = build(CASES[name])
    assert isinstance(dist, SquashedGaussian)
    close(dist.to_bounds(action)[0], expected["action"])
    close(dist.to_bounds(dist.mode(p))[0], expected["deterministic_action"])
    close(dist.log_prob(p, action), [expected["logp_p_action"]])
    close(dist.kl(p, q), [expected["kl_pq"]])
    close(dist.entropy(p), [expected["entropy_p"]], rel=1e-6)


# ---- losses


@pytest.mark.parametrize("name", ["ppo_01_clip_surrogate"])
def test_policy_loss_golden(name: str) -> None:
    given, expected = load(name)
    new = f64(given["new_logp"]).requires_grad_()
    old, advantages, clip = f64(given["old_logp"]), f64(given["advantages"]), given["clip"]
    rows = losses.clipped_policy_loss(new, old, advantages, clip)
    close(-rows.detach(), expected["surrogate"])
    losses.masked_mean(rows).backward()
    close(losses.masked_mean(rows.detach()), expected["loss"])
    close(new.grad, expected["grad_new_logp"])
    assert new.grad is not None and torch.all(new.grad[f64(expected["grad_new_logp"]) == 0] == 0)
    ratios = losses.log_ratio(new.detach(), old)
    close(ratios.exp(), expected["ratio"])
    close(losses.outside_clip(new.detach(), old, clip).double().mean(), expected["clip_fraction"])
    for key, estimate in {"kl_k1": losses.kl_k1, "kl_k2": losses.kl_k2, "kl_k3": losses.kl_k3}.items():
        close(estimate(ratios).mean(), expected[key])


@pytest.mark.parametrize("name", ["ppo_02_value_losses"])
def test_value_loss_golden(name: str) -> None:
    given, expected = load(name)
    values, old, targets = (f64(given[key]) for key in ("new_values", "old_values", "targets"))
    rows = losses.value_loss(values, targets)
    close(rows, expected["squared_error"])
    close(losses.masked_mean(rows), expected["mean_squared_error"])
    close(losses.masked_mean(rows) / 2, expected["half_mean_squared_error"])

    ppo2 = losses.value_loss(values, targets, old, vf_clip="clipped_value", clip=given["value_clip"])
    close(ppo2, expected["baselines_clipped_per_sample"])
    close(losses.masked_mean(ppo2) / 2, expected["baselines_clipped_half_mean"])

    rllib = losses.value_loss(values, targets, old, vf_clip="clamped_error", clip=given["vf_clip_param"])
    close(rllib, expected["rllib_clamped_per_sample"])
    close(losses.masked_mean(rllib), expected["rllib_clamped_mean"])

    # A fourth one, which is not offered: only the error of the value that was kept near the old one.
    near = losses.clip_around(values, old, given["value_clip"])
    close(losses.value_loss(near, targets).mean(), expected["sb3_clipped_prediction_mse"])


@pytest.mark.parametrize("name", ["ppo_03_adaptive_kl"])
def test_adaptive_kl_golden(name: str) -> None:
    given, expected = load(name)
    beta, seen = given["kl_coeff"], []
    for kl in given["sampled_kl"]:
        beta = losses.adapt_kl_coeff(beta, kl, given["kl_target"])
        seen.append(beta)
    close(f64(seen), expected["kl_coeff_after"])


@pytest.mark.parametrize("name", ["ppo_04_decoupled"])
def test_policy_loss_golden_decoupled(name: str) -> None:
    given, expected = load(name)
    new, prox, behaviour = (f64(given[key]) for key in ("new_logp", "prox_logp", "behaviour_logp"))
    weights = (prox - behaviour).exp().clamp(max=given["behaviour_weight_cap"])
    close(losses.log_ratio(new, prox).exp(), expected["prox_ratio"])
    rows = losses.clipped_policy_loss(new, prox, f64(given["advantages"]), given["clip"], weights)
    close(rows, expected["per_sample_loss"])
    close(losses.masked_mean(rows), expected["loss"])


@pytest.mark.parametrize("name", ["appo_01_target_clipped_surrogate"])
def test_policy_loss_golden_around_a_target_policy(name: str) -> None:
    given, expected = load(name)
    new, target, behaviour = (f64(given[key]) for key in ("new_logp", "target_logp", "behaviour_logp"))
    centre = losses.target_centre(target, behaviour, given["rho"])
    close((behaviour - centre).exp(), expected["is_weight"])
    close(losses.log_ratio(new, centre).exp(), expected["ratio"])
    rows = losses.clipped_policy_loss(new, centre, f64(given["advantages"]), given["clip"])
    close(rows, expected["per_sample_loss"])
    close(losses.masked_mean(rows), expected["loss"])


@pytest.mark.parametrize("name", ["ppo_05_total_loss_masked"])
@pytest.mark.parametrize("poison", [1e6, math.nan])
def test_total_loss_golden(name: str, poison: float) -> None:
    given, expected = load(name)
    mask = torch.tensor(given["mask"]) == 1
    logits = f64(given["logits_new"]).requires_grad_()
    rows = {key: f64(given[key]) for key in ("advantages", "values_new", "value_targets")}
    rows = {key: torch.where(mask, x, poison)[mask] for key, x in rows.items()}
    new, old = logits[mask], f64(given["logits_old"])[mask]
    actions = torch.tensor(given["actions"])[mask].unsqueeze(1)
    dist = Categorical(3)
    policy = losses.clipped_policy_loss(
        dist.log_prob(new, actions), dist.log_prob(old, actions), rows["advantages"], given["clip"]
    )
    terms = {
        "policy_loss": policy.mean(),
        "value_loss": losses.value_loss(rows["values_new"], rows["value_targets"]).mean(),
        "entropy": dist.entropy(new).mean(),
        "kl_old_new": dist.kl(old, new).mean(),
    }
    loss = (
        terms["policy_loss"]
        + given["vf_coef"] * terms["value_loss"]
        - given["ent_coef"] * terms["entropy"]
        + given["kl_coef"] * terms["kl_old_new"]
    )
    loss.backward()
    for key, value in terms.items():
        close(value.detach(), expected[key])
    close(loss.detach(), expected["loss"])
    close(logits.grad, expected["grad_logits_new"])


@pytest.mark.parametrize("name", ["ppo_06_lag_scaled_clip"])
def test_policy_loss_golden_lag_scaled_clip(name: str) -> None:
    given, expected = load(name)
    scale = given["clip"], given["lag_factor"], given["clip_max"]
    eps = [losses.lag_scaled_clip(scale[0], f64(given[k]), *scale[1:]) for k in ("lags_for_table", "lag")]
    close(eps[0], expected["eps_table"])
    close(eps[1], expected["eps"])
    new = f64(given["new_logp"]).requires_grad_()
    behaviour = f64(given["behaviour_logp"])
    rows = losses.clipped_policy_loss(new, behaviour, f64(given["advantages"]), eps[1])
    close(losses.log_ratio(new.detach(), behaviour).exp(), expected["ratio"])
    close(rows.detach(), expected["per_sample_loss"])
    rows.mean().backward()
    close(rows.mean().detach(), expected["loss"])
    close(new.grad, expected["grad_new_logp"])


# ---- the rest


@pytest.mark.parametrize("name", ["sched_01_piecewise_linear"])
def test_schedule_golden(name: str) -> None:
    given, expected = load(name)
    close(f64([schedule_value(given["points"], step) for step in given["steps"]]), expected["values"])


@pytest.mark.parametrize("name", ["grad_01_global_norm"])
def test_gradient_clipping_golden(name: str) -> None:
    """torch's own clipping does what is specified, so there is none here."""
    given, expected = load(name)
    params = []
    for grad in given["grads"]:
        params.append(torch.nn.Parameter(torch.zeros_like(f64(grad))))
        params[-1].grad = f64(grad)
    close(torch.nn.utils.clip_grad_norm_(params, given["max_norm"]), expected["global_norm"])
    for param, clipped in zip(params, expected["clipped"], strict=True):
        close(param.grad, clipped, rel=1e-6)


@pytest.mark.parametrize("name", ["stats_01_parallel_moments"])
def test_moments_golden(name: str) -> None:
    given, expected = load(name)
    total = RunningMoments()
    for batch in given["batches"]:
        worker = RunningMoments()
        worker.update(f64(batch))
        total.merge(worker)
    assert total.count == expected["count"]
    close(total.mean, expected["mean"])
    close(total.variance, expected["var_population"])


@pytest.mark.parametrize("name", ["stats_02_return_scaling"])
def test_return_scaling_golden(name: str) -> None:
    given, expected = load(name)
    scaler = ReturnScaler(given["gamma"], clip=given["clip"])
    rewards = f64(given["rewards"]).unsqueeze(1)
    sums = scaler.update(rewards, torch.tensor(given["done"]).unsqueeze(1))
    close(sums[:, 0], expected["discounted_sums"])
    close(scaler.moments.variance, expected["var_population"])
    close(scaler.scale(rewards)[:, 0], expected["scaled_with_final_stats"])


@pytest.mark.parametrize("name", ["metric_02_iqm"])
def test_interquartile_mean_golden(name: str) -> None:
    given, expected = load(name)
    scores = f64(given["scores"])
    close(iqm(scores), expected["iqm"])
    close(scores.mean(), expected["mean"])
    close(scores.quantile(0.5), expected["median"])


@pytest.mark.parametrize("name", ["metric_01_explained_variance"])
def test_explained_variance_golden(name: str) -> None:
    given, expected = load(name)
    value = losses.explained_variance(f64(given["predictions"]), f64(given["targets"]))
    assert value == pytest.approx(expected["value"], rel=1e-9)
    assert math.isnan(losses.explained_variance(f64([1.0, 2.0]), f64([3.0, 3.0])))


@pytest.mark.parametrize("name", ["metric_03_ess"])
def test_effective_sample_size_golden(name: str) -> None:
    given, expected = load(name)
    assert losses.effective_sample_size(f64(given["weights"])) == pytest.approx(expected["ess_fraction"], rel=1e-9)


@pytest.mark.parametrize("name", ["dist_learner_01_unequal_shards"])
def test_shares_of_a_batch_golden(name: str) -> None:
    """Gradients of unequal shards add up to the gradient of the whole; averaging their means does not."""
    given, expected = load(name)
    x, y = f64(given["X"]), f64(given["y"])
    grads = {"share": torch.zeros(2, dtype=torch.float64), "means": torch.zeros(2, dtype=torch.float64)}
    for shard in given["shards"]:
        for key, count in {"share": len(y), "means": None}.items():
            w = f64(given["w"]).requires_grad_()
            losses.masked_mean(losses.value_loss(x[shard] @ w, y[shard]), count=count).backward()
            assert w.grad is not None
            grads[key] += w.grad
    close(grads["share"], expected["gradient"])
    close(grads["means"] / len(given["shards"]), expected["wrong_mean_of_means"])


@pytest.mark.parametrize("name", ["dist_learner_02_global_adv_norm"])
def test_normalisation_over_shards_golden(name: str) -> None:
    given, expected = load(name)
    shards = [f64(x) for x in given["shards"]]
    total = RunningMoments()
    for shard in shards:
        total.update(shard)
    close(total.mean, expected["mean"])
    close(total.variance.sqrt(), expected["std"])
    for shard, normalized in zip(shards, expected["normalized"], strict=True):
        close(normalize_advantages(shard, given["eps"], total), normalized)
