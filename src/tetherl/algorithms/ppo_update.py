"""The epochs of PPO over one prepared batch: minibatches, loss, optimizer steps, and the numbers that describe them.

The loss is written down in `ppo`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tetherl.algorithms.config import AlgorithmConfig
from tetherl.algorithms.minibatches import Minibatch, chunk_minibatches, row_minibatches
from tetherl.algorithms.parallel import Reduction
from tetherl.algorithms.preparation import PreparedBatch, Recipe, refresh
from tetherl.data.batch import ranges
from tetherl.models.policy import Policy
from tetherl.ops.losses import (
    adapt_kl_coeff,
    clipped_policy_loss,
    effective_sample_size,
    explained_variance,
    kl_k1,
    kl_k2,
    kl_k3,
    lag_scaled_clip,
    log_ratio,
    value_loss,
)
from tetherl.ops.normalize import RunningMoments, normalize_advantages
from tetherl.ops.schedules import schedule_value

T = TypeVar("T")
KLS = ("kl", "kl_k1", "kl_k2", "kl_k3")
STOP_FACTOR = 1.5
"""An update ends early when k3 of a minibatch exceeds this many times target_kl."""


class UpdatingLearner(Protocol):
    """What an update needs of its learner: `PPOLearner`."""

    config: AlgorithmConfig
    policy: Policy
    device: torch.device
    generator: torch.Generator
    recipe: Recipe
    reduction: Reduction | None
    kl_coeff: float

    @property
    def part(self) -> tuple[int, int]: ...

    def backward(self, loss: Tensor | None, numbers: Tensor) -> Tensor: ...

    def step(self, loss: Tensor, *, lr: float) -> Tensor | None: ...

    def skip(self, cause: str) -> None: ...

    def non_finite_gradient(self) -> str | None: ...


class Update:
    """The epochs over one prepared batch. valid: [N] bool, the rows that are trained on."""

    def __init__(
        self, learner: UpdatingLearner, prepared: PreparedBatch, valid: np.ndarray, steps_trained: int
    ) -> None:
        config, device = learner.config, learner.device
        self.learner, self.config, self.prepared, self.valid = learner, config, prepared, valid
        self.policy, self.dist = learner.policy, learner.policy.dist
        assert config.lr is not None and config.entropy_coeff is not None
        self.lr = schedule_value(config.lr, steps_trained)
        self.clip = schedule_value(config.clip_param, steps_trained)
        self.entropy_coeff = schedule_value(config.entropy_coeff, steps_trained)
        self.use_kl_loss = resolved(config.use_kl_loss)

        self.rows = torch.from_numpy(np.flatnonzero(valid)).to(device)
        self.lag = torch.from_numpy(prepared.batch.lag[valid]).to(device)
        kappa = config.lag_factor if config.loss == "lag_scaled" else 0.0
        limit = config.clip_max if config.loss == "lag_scaled" else math.inf
        self.epsilon = lag_scaled_clip(self.clip, self.lag.to(prepared.logp), kappa, limit)
        behaviour, prox = prepared.logp[self.rows], prepared.prox_logp[self.rows]
        columns = {"centre": behaviour, "epsilon": self.epsilon, "prox": prox}
        self.weights: Tensor | None = None
        if config.loss == "decoupled":
            self.weights = log_ratio(prox, behaviour).exp().clamp(max=config.weight_cap)
            columns |= {"centre": prox, "weight": self.weights}
        if config.vf_clip == "clipped_value":
            # Before the first batch of all, values are in reward units and statistics leave them as they are.
            fresh = resolved(config.normalize_values) and float(self.policy.value_count) == 0
            old = prepared.values[self.rows]
            targets = self._targets()
            columns["old_value"] = old if fresh else self.policy.normalize(old)
        else:
            targets = self._targets()
        columns |= {"advantage": self._advantages(), "target": targets}
        # One table, so that a minibatch needs one look-up; rows that are not trained on stay zero.
        self.column = {name: i for i, name in enumerate(columns)}
        self.table = torch.zeros(len(columns), len(valid), device=device, dtype=prepared.logp.dtype)
        self.table[:, self.rows] = torch.stack(list(columns.values()))

        self.names = ["loss", "policy_loss", "vf_loss", "entropy", "clip_fraction"]
        self.names += [] if config.vf_clip == "none" else ["vf_clip_fraction"]
        self.stopped = False
        self.ratio_max_first: Tensor | None = None
        self.ratio_max = self.table.new_zeros(())

    def run(self) -> dict[str, float]:
        """All epochs; returns the metrics."""
        config = self.config
        metrics = self._metrics_before()
        self.means, self.norms, self.kls = Mean(), Mean(), Mean()
        epochs = resolved(config.epochs)
        for epoch in range(epochs):
            if epoch:
                self._refresh()
            if config.kl_measure != "all":
                self.kls = Mean()
            measure = epoch == epochs - 1 or config.kl_measure == "all" or config.target_kl is not None
            for minibatch in self._minibatches():
                self._step(minibatch, measure_kl=measure)
                if self.stopped:
                    break
            if self.stopped:
                break
        metrics |= self._metrics_after()
        metrics["learner/epochs"] = float(epoch + 1)
        kl = metrics.get("learner/kl")
        if kl is not None and self.use_kl_loss and math.isfinite(kl):
            self.learner.kl_coeff = adapt_kl_coeff(self.learner.kl_coeff, kl, config.kl_target)
        return metrics

    def _targets(self) -> Tensor:
        """[valid rows] value targets in the critic's scale, whose statistics move first."""
        targets = self.prepared.targets[self.rows]
        if resolved(self.config.normalize_values):
            self.policy.update_value_stats(targets)
        return self.policy.normalize(targets)

    def _advantages(self) -> Tensor:
        advantages = self.prepared.advantages[self.rows]
        return normalize_advantages(advantages) if self.config.advantage_norm == "batch" else advantages

    def _refresh(self) -> None:
        """Before every epoch but the first: what is to be recomputed with the network as it is now."""
        advantages = self.config.recompute_advantages == "per_epoch"
        states = self.config.state_refresh == "per_epoch" and self.prepared.chunks is not None
        if not advantages and not states:
            return
        refresh(self.policy, self.prepared, self.learner.recipe, advantages=advantages, states=states)
        if advantages:
            self.table[self.column["advantage"], self.rows] = self._advantages()
            self.table[self.column["target"], self.rows] = self.policy.normalize(self.prepared.targets[self.rows])

    def _minibatches(self) -> Iterator[Minibatch]:
        size, generator = resolved(self.config.minibatch_size), self.learner.generator
        shuffle, part = self.config.shuffle, self.learner.part
        if self.prepared.chunks is None:
            return row_minibatches(self.valid, size, generator, shuffle=shuffle, part=part)
        return chunk_minibatches(self.valid, self.prepared.chunks, size, generator, shuffle=shuffle, part=part)

    def _step(self, minibatch: Minibatch, *, measure_kl: bool) -> Tensor:
        """One optimizer step; returns the numbers that are called `names`, and with measure_kl those of KLS.

        Nothing changes when a number is not finite, or when the update ends here (`stopped`).
        """
        config, prepared, learner = self.config, self.prepared, self.learner
        count = minibatch.count
        if len(minibatch.trained) == 0:  # of several learners this one has no row
            return self._finish(None, self.table.new_zeros(len(self.names) + measure_kl * len(KLS)), minibatch, {})

        def mean(rows: Tensor) -> Tensor:
            return rows.mean() if learner.reduction is None else rows.sum() / count

        inputs, values = self._forward(minibatch)
        trained = self._index(minibatch.trained)
        row = dict(zip(self.column, self.table.index_select(1, trained).unbind(0), strict=True))
        advantages = self._normalised(row["advantage"], minibatch)

        actions = prepared.actions.index_select(0, trained)
        mask = None if prepared.mask is None else prepared.mask.index_select(0, trained)
        logp = self.dist.log_prob(inputs, actions, mask)
        policy_loss = mean(clipped_policy_loss(logp, row["centre"], advantages, row["epsilon"], row.get("weight")))
        old_values = row.get("old_value")
        vf_loss = mean(value_loss(values, row["target"], old_values, vf_clip=config.vf_clip, clip=config.vf_clip_param))
        loss = policy_loss + config.vf_loss_coeff * vf_loss
        # Terms that are off are measured without a gradient and never multiplied by 0: 0·inf is NaN.
        with torch.set_grad_enabled(self.entropy_coeff != 0):
            entropy = mean(self.dist.sampled_entropy(inputs, actions, mask))
        if self.entropy_coeff != 0:
            loss = loss - self.entropy_coeff * entropy
        kl = None
        if self.use_kl_loss or measure_kl:
            with torch.set_grad_enabled(self.use_kl_loss):
                kl = mean(self.dist.kl(prepared.prox_dist.index_select(0, trained), inputs, mask))
        if self.use_kl_loss and kl is not None:
            loss = loss + learner.kl_coeff * kl

        with torch.no_grad():
            ratio = log_ratio(logp, row["centre"]).exp()
            off = (ratio - 1.0).abs()
            numbers = [loss, policy_loss, vf_loss, entropy, mean((off > row["epsilon"]).to(off.dtype))]
            if config.vf_clip != "none":
                numbers.append(mean(self._value_clipped(values, row["target"], old_values)))
            if measure_kl and kl is not None:
                moved = log_ratio(logp, row["prox"])
                numbers += [kl, mean(kl_k1(moved)), mean(kl_k2(moved)), mean(kl_k3(moved))]
            self.ratio_max = torch.maximum(self.ratio_max, ratio.max())
        named = {
            "distribution inputs of the network": inputs,
            "value of the network": values,
            "log-probability of the actions": logp,
            "policy loss": policy_loss,
            "value loss": vf_loss,
            "entropy": entropy,
            "KL divergence": kl,
        }
        first_off = off if self.ratio_max_first is None else None
        return self._finish(loss, torch.stack(numbers).detach(), minibatch, named, first_off)

    def _finish(
        self,
        loss: Tensor | None,
        numbers: Tensor,
        minibatch: Minibatch,
        named: dict[str, Tensor | None],
        off: Tensor | None = None,
    ) -> Tensor:
        """Backward pass, exchange with the other learners, optimizer step, book-keeping.

        named: what the loss came from, in the order of computation, to say what was not finite. off: |ratio - 1| of
        the rows, until the first step is made.
        """
        numbers = self.learner.backward(loss, numbers)
        kls = numbers[len(self.names) :]
        target = self.config.target_kl
        if target is not None and float(kls[-1]) > STOP_FACTOR * target:
            self.stopped = True
        else:
            norm = self.learner.step(numbers[0], lr=self.lr)
            if norm is None:
                self.learner.skip(self._cause(named))
                return numbers
            if self.ratio_max_first is None:
                self.ratio_max_first = self._ratio_before_first_step(off, minibatch)
            self.means.add(numbers[: len(self.names)], minibatch.count)
            self.norms.add(norm, minibatch.count)
        if len(kls):
            if self.config.kl_measure == "last_minibatch":
                self.kls = Mean()
            self.kls.add(kls, minibatch.count)
        return numbers

    def _normalised(self, advantages: Tensor, minibatch: Minibatch) -> Tensor:
        if self.config.advantage_norm != "minibatch":
            return advantages
        if minibatch.whole is None:
            return normalize_advantages(advantages)
        moments = RunningMoments()
        moments.update(self.table[self.column["advantage"], self._index(minibatch.whole)])
        return normalize_advantages(advantages, moments=moments)

    def _value_clipped(self, values: Tensor, targets: Tensor, old_values: Tensor | None) -> Tensor:
        """Rows whose value error was clipped, as 0 and 1."""
        limit = self.config.vf_clip_param
        moved = (values - targets).square() if old_values is None else (values - old_values).abs()
        return (moved > limit).to(values.dtype)

    def _forward(self, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """Distribution inputs and values of the rows that are trained on, selected before any arithmetic."""
        state = None
        if minibatch.chunks is not None and self.prepared.chunk_states is not None:
            state = self.prepared.chunk_states.index_select(0, self._index(minibatch.chunks))
            if self.config.burn_in:
                state = self._burn_in(minibatch.chunks, state)
        out = self.policy(*self.prepared.inputs.take(minibatch.rows), minibatch.lengths, state)
        if minibatch.picked is None:
            return out.dist, out.values
        picked = self._index(minibatch.picked)
        return out.dist.index_select(0, picked), out.values.index_select(0, picked)

    @torch.no_grad()
    def _burn_in(self, ids: np.ndarray, state: Tensor) -> Tensor:
        """[c, S] states at the chunks' first rows, from those at the first row of their burn-in."""
        assert self.prepared.chunks is not None and self.prepared.burn_in is not None
        lengths = self.prepared.burn_in[ids]
        warm = np.flatnonzero(lengths)
        if len(warm) == 0:
            return state
        lengths = lengths[warm]
        rows = ranges(self.prepared.chunks[ids[warm], 3] - lengths, lengths)
        where = self._index(warm)
        out = self.policy(*self.prepared.inputs.take(rows), lengths.tolist(), state.index_select(0, where))
        assert out.state is not None
        return state.index_copy(0, where, out.state.to(state.dtype))

    def _metrics_before(self) -> dict[str, float]:
        """What can be said of the batch before the first optimizer step."""
        prepared, rows = self.prepared, self.rows
        with torch.no_grad():
            off = _ratio_off(prepared.prox_logp[rows], prepared.logp[rows])
            mask = None if prepared.mask is None else prepared.mask[rows]
            kl = self.dist.kl(prepared.dist[rows], prepared.prox_dist[rows], mask).mean()
            targets, advantages = prepared.targets[rows], prepared.advantages[rows]
            metrics: dict[str, Tensor | float] = {
                "lag/min": self.lag.min(),
                "lag/mean": self.lag.double().mean(),
                "lag/max": self.lag.max(),
                "learner/kl_behaviour": kl,
                "learner/advantage_mean": advantages.mean(),
                "learner/advantage_std": advantages.std(unbiased=False),
                "learner/value_mean": prepared.values[rows].mean(),
                "learner/target_mean": targets.mean(),
                "learner/explained_variance": explained_variance(prepared.values[rows], targets),
            }
            if self.weights is None:  # else the clip is around prox, and nothing is outside yet
                metrics["learner/outside_clip_first"] = (off > self.epsilon).double().mean()
            else:
                metrics["learner/ess"] = effective_sample_size(self.weights)
                metrics["learner/weight_max"] = self.weights.max()
        numbers = {key: float(value) for key, value in metrics.items()}
        numbers |= {
            "learner/lr": self.lr,
            "learner/clip_param": self.clip,
            "learner/entropy_coeff": self.entropy_coeff,
        }
        # The explained variance of constant targets is not a number, and then not reported.
        return {key: value for key, value in numbers.items() if math.isfinite(value)}

    def _metrics_after(self) -> dict[str, float]:
        """What the optimizer steps gave."""
        metrics = {"learner/steps": float(self.means.batches)}
        if self.means.rows:
            means = dict(zip(self.names, self.means.value().tolist(), strict=True))
            metrics |= {f"learner/{k}": v for k, v in means.items() if k != "loss"}
            metrics["learner/grad_norm"] = float(self.norms.value())
        if self.kls.rows:
            metrics |= {f"learner/{k}": v for k, v in zip(KLS, self.kls.value().tolist(), strict=True)}
        first = self.table.new_tensor(-1.0) if self.ratio_max_first is None else self.ratio_max_first
        maxima = torch.stack([first, self.ratio_max])
        if self.learner.reduction is not None:
            self.learner.reduction.max(maxima)
        first_max, ratio_max = maxima.tolist()
        if math.isfinite(ratio_max):
            metrics["learner/ratio_max"] = ratio_max
        if first_max >= 0:
            metrics["learner/ratio_max_first"] = first_max
        return metrics

    def _ratio_before_first_step(self, off: Tensor | None, minibatch: Minibatch) -> Tensor | None:
        """Largest |ratio - 1| over fresh rows: in the pass over the batch, and in the first minibatch."""
        fresh = self.rows[self._index(self.prepared.batch.fresh(self.policy.is_recurrent)[self.valid])]
        if len(fresh) == 0:
            return None
        in_pass = _ratio_off(self.prepared.prox_logp[fresh], self.prepared.logp[fresh]).max()
        if off is None:
            return in_pass
        in_step = off[torch.isin(self._index(minibatch.trained), fresh)]
        return torch.maximum(in_pass, in_step.max()) if len(in_step) else in_pass

    def _cause(self, named: dict[str, Tensor | None]) -> str:
        """Names the first number of a skipped step that is not finite."""
        for name, tensor in named.items():
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                return name
        return self.learner.non_finite_gradient() or "gradient norm"

    def _index(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self.learner.device)


class Mean:
    """A mean over rows, from means over minibatches: it carries its sum and its count."""

    def __init__(self) -> None:
        self.rows = self.batches = 0
        self._sum: Tensor | float = 0.0

    def add(self, mean: Tensor, rows: int) -> None:
        self._sum = self._sum + mean * rows
        self.rows += rows
        self.batches += 1

    def value(self) -> Tensor:
        assert isinstance(self._sum, Tensor)
        return self._sum / self.rows


def _ratio_off(logp: Tensor, logp_old: Tensor) -> Tensor:
    """|ratio - 1| per row."""
    return log_ratio(logp, logp_old).exp().sub(1.0).abs()


def resolved(value: T | None) -> T:
    """A resolved setting (checked when the learner was made)."""
    assert value is not None
    return value
