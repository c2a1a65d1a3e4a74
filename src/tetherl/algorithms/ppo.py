"""Proximal policy optimisation, for fresh and for late experience: all that is PPO.

    L = -⟨min(q·Â, clip(q, 1 - ε, 1 + ε)·Â)⟩ + c_v·⟨(V - target)²⟩ - c_e·⟨H⟩ + β·⟨KL(prox‖new)⟩

q is the ratio to the policy that acted; ε grows with a row's lag (at lag 0 this is plain PPO); prox is the
policy at the start of the update, equal to the one that acted at lag 0; ⟨·⟩ is the mean over valid rows.
Schulman et al. 2017 (arXiv:1707.06347); advantages: Schulman et al. 2016 (arXiv:1506.02438).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tetherl.algorithms.config import AlgorithmConfig
from tetherl.algorithms.learner import Learner, LearnResult
from tetherl.algorithms.minibatches import Minibatch, chunk_minibatches, row_minibatches
from tetherl.algorithms.preparation import PreparedBatch, first_non_finite, prepare
from tetherl.data.batch import assemble
from tetherl.data.fragment import Fragment
from tetherl.errors import CheckpointError, ConfigError
from tetherl.models.policy import Policy
from tetherl.ops.losses import (
    adapt_kl_coeff,
    clipped_policy_loss,
    explained_variance,
    lag_scaled_clip,
    log_ratio,
    value_loss,
)
from tetherl.ops.normalize import normalize_advantages
from tetherl.ops.schedules import schedule_value

T = TypeVar("T")
_RESOLVED = ("minibatch_size", "epochs", "lr", "max_lag", "entropy_coeff", "use_kl_loss", "normalize_values")


class PPOLearner(Learner):
    """Turns fragments into better weights.

    config must be resolved: none of minibatch_size, epochs, lr, max_lag, entropy_coeff, use_kl_loss and
    normalize_values may be None (ConfigError). max_seq_len: rows per chunk of a recurrent policy.
    """

    def __init__(
        self, policy: Policy, config: AlgorithmConfig, *, max_seq_len: int, seed: int, device: str = "cpu"
    ) -> None:
        for key in _RESOLVED:
            if getattr(config, key) is None:
                raise ConfigError(f"algorithm.{key} is not set; the learner needs the resolved configuration")
        super().__init__(policy, adam_eps=config.adam_eps, grad_clip=config.grad_clip, seed=seed, device=device)
        self.config = config
        self.max_seq_len = max_seq_len
        self.kl_coeff = config.kl_coeff if config.use_kl_loss else 0.0

    def update(self, fragments: list[Fragment], *, version: int, steps_trained: int) -> LearnResult:
        """See `Learner.update`. Rows that are late, not the policy's, or in a fragment with a number that is
        not finite are not trained on and counted: "stale", "not_policy", "quarantined"."""
        config = self.config
        batch, kept, dropped = assemble(
            fragments,
            version=version,
            max_lag=_set(config.max_lag),
            state_size=self.policy.state_size,
        )
        if batch is None:
            return LearnResult(self._counters(0), 0, dropped)
        prepared = prepare(
            self.policy,
            batch,
            gamma=config.gamma,
            lam=config.lambda_,
            max_seq_len=self.max_seq_len,
            device=self.device,
        )
        valid = batch.valid & prepared.finite[batch.fragment_of_row]
        warnings: list[str] = []
        broken = np.flatnonzero(~prepared.finite).tolist()
        if broken:
            dropped["quarantined"] = int(batch.valid.sum() - valid.sum())
            warnings = [
                f"worker {kept[i].worker}, episode {kept[i].episode_id!r}, rows from {kept[i].t0}: "
                f"{first_non_finite(prepared, i)}; the fragment's rows are not trained on"
                for i in broken
            ]
        if not valid.any():
            self.skip(warnings[0])
            return LearnResult(self._counters(0), 0, dropped, warnings)
        metrics = _Update(self, prepared, valid, steps_trained).run()
        trained = int(valid.sum())
        metrics["learner/valid_fraction"] = trained / (trained + sum(dropped.values()))
        metrics["learner/quarantined_fragments"] = float(len(broken))
        return LearnResult(metrics | self._counters(metrics["learner/steps"]), trained, dropped, warnings)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays, meta = super().state()
        return arrays, meta | {"kl_coeff": self.kl_coeff}

    def load_state(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        if "kl_coeff" not in meta:
            raise CheckpointError("learner state: kl_coeff is missing; the checkpoint is of another version")
        super().load_state(arrays, meta)
        self.kl_coeff = float(meta["kl_coeff"])

    def _counters(self, steps: float) -> dict[str, float]:
        return {
            "learner/steps": steps,
            "learner/skipped_steps": float(self._skipped_steps),
            "learner/kl_coeff": self.kl_coeff,
        }


class _Update:
    """The epochs over one prepared batch. valid: [N] bool, the rows that are trained on."""

    def __init__(self, learner: PPOLearner, prepared: PreparedBatch, valid: np.ndarray, steps_trained: int) -> None:
        config, device = learner.config, learner.device
        self.learner, self.config, self.prepared, self.valid = learner, config, prepared, valid
        self.policy, self.dist = learner.policy, learner.policy.dist
        assert config.lr is not None and config.entropy_coeff is not None
        self.lr = schedule_value(config.lr, steps_trained)
        self.clip = schedule_value(config.clip_param, steps_trained)
        self.entropy_coeff = schedule_value(config.entropy_coeff, steps_trained)
        self.use_kl_loss = _set(config.use_kl_loss)

        self.rows = torch.from_numpy(np.flatnonzero(valid)).to(device)
        self.lag = torch.from_numpy(prepared.batch.lag[valid]).to(device)
        epsilon = lag_scaled_clip(self.clip, self.lag.to(prepared.logp), config.lag_factor, config.clip_max)
        advantages = prepared.advantages[self.rows]
        if config.advantage_norm == "batch":
            advantages = normalize_advantages(advantages)
        columns = [prepared.logp[self.rows], advantages, self._targets(), epsilon]
        # One table, so that a minibatch needs one look-up; rows that are not trained on stay zero.
        self.table = torch.zeros(len(columns), len(valid), device=device)
        self.table[:, self.rows] = torch.stack(columns)
        self.ratio_max_first: Tensor | None = None

    def run(self) -> dict[str, float]:
        """All epochs; returns the metrics."""
        metrics = self._metrics_before()
        sums = torch.zeros(5, device=self.learner.device)
        kl_sum = torch.zeros((), device=self.learner.device)
        rows = kl_rows = steps = 0
        epochs = _set(self.config.epochs)
        for epoch in range(epochs):
            last = epoch == epochs - 1
            for minibatch in self._minibatches():
                measured = self._step(minibatch, measure_kl=last)
                if measured is None:
                    continue
                numbers, kl = measured
                count = len(minibatch.trained)
                sums += numbers * count
                rows += count
                steps += 1
                if kl is not None:
                    kl_sum += kl * count
                    kl_rows += count
        metrics["learner/steps"] = float(steps)
        if rows:
            names = ("policy_loss", "vf_loss", "entropy", "clip_fraction", "grad_norm")
            metrics |= {f"learner/{k}": v for k, v in zip(names, (sums / rows).tolist(), strict=True)}
        if kl_rows:
            metrics["learner/kl"] = kl_mean = float(kl_sum) / kl_rows
            if self.use_kl_loss and math.isfinite(kl_mean):
                self.learner.kl_coeff = adapt_kl_coeff(self.learner.kl_coeff, kl_mean, self.config.kl_target)
        if self.ratio_max_first is not None:
            metrics["learner/ratio_max_first"] = float(self.ratio_max_first)
        return metrics

    def _targets(self) -> Tensor:
        """[valid rows] value targets in the critic's scale, whose statistics move first."""
        targets = self.prepared.targets[self.rows]
        if _set(self.config.normalize_values):
            self.policy.update_value_stats(targets)
        return self.policy.normalize(targets)

    def _minibatches(self) -> Iterator[Minibatch]:
        size, generator = _set(self.config.minibatch_size), self.learner.generator
        if self.prepared.chunks is None:
            return row_minibatches(self.valid, size, generator)
        return chunk_minibatches(self.valid, self.prepared.chunks, size, generator)

    def _step(self, minibatch: Minibatch, *, measure_kl: bool) -> tuple[Tensor, Tensor | None] | None:
        """One optimizer step -> ([policy_loss, vf_loss, entropy, clip_fraction, grad_norm], KL or None);
        None if it was skipped."""
        config, prepared = self.config, self.prepared
        inputs, values = self._forward(minibatch)
        trained = self._index(minibatch.trained)
        logp_old, advantages, targets, epsilon = self.table.index_select(1, trained).unbind(0)
        if config.advantage_norm == "minibatch":
            advantages = normalize_advantages(advantages)

        logp = self.dist.log_prob(inputs, prepared.actions.index_select(0, trained))
        policy_loss = clipped_policy_loss(logp, logp_old, advantages, epsilon).mean()
        vf_loss = value_loss(values, targets).mean()
        loss = policy_loss + config.vf_loss_coeff * vf_loss
        # Terms that are off are measured without a gradient and never multiplied by 0: 0·inf is NaN.
        with torch.set_grad_enabled(self.entropy_coeff != 0):
            entropy = self.dist.entropy(inputs).mean()
        if self.entropy_coeff != 0:
            loss = loss - self.entropy_coeff * entropy
        kl = None
        if self.use_kl_loss or measure_kl:
            with torch.set_grad_enabled(self.use_kl_loss):
                kl = self.dist.kl(prepared.prox_dist.index_select(0, trained), inputs).mean()
        if self.use_kl_loss and kl is not None:
            loss = loss + self.learner.kl_coeff * kl

        with torch.no_grad():
            off = _ratio_off(logp, logp_old)
            clip_fraction = (off > epsilon).to(off.dtype).mean()
        grad_norm = self.learner.optimize(loss, lr=self.lr)
        if grad_norm is None:
            self.learner.skip(self._cause(inputs, values, logp, policy_loss, vf_loss, entropy, kl))
            return None
        if self.ratio_max_first is None:
            self.ratio_max_first = self._ratio_before_first_step(off, trained)
        numbers = torch.stack([policy_loss, vf_loss, entropy, clip_fraction, grad_norm]).detach()
        return numbers, kl.detach() if measure_kl and kl is not None else None

    def _forward(self, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """Distribution inputs and values of the rows that are trained on, selected before any arithmetic."""
        state = None
        if minibatch.chunks is not None and self.prepared.chunk_states is not None:
            state = self.prepared.chunk_states.index_select(0, self._index(minibatch.chunks))
        out = self.policy(*self.prepared.inputs.take(minibatch.rows), minibatch.lengths, state)
        if minibatch.picked is None:
            return out.dist, out.values
        picked = self._index(minibatch.picked)
        return out.dist.index_select(0, picked), out.values.index_select(0, picked)

    def _metrics_before(self) -> dict[str, float]:
        """What can be said of the batch before the first optimizer step."""
        prepared, rows = self.prepared, self.rows
        with torch.no_grad():
            off = _ratio_off(prepared.prox_logp[rows], prepared.logp[rows])
            kl = self.dist.kl(prepared.dist[rows], prepared.prox_dist[rows]).mean()
            targets, advantages = prepared.targets[rows], prepared.advantages[rows]
            metrics: dict[str, Tensor | float] = {
                "lag/min": self.lag.min(),
                "lag/mean": self.lag.double().mean(),
                "lag/max": self.lag.max(),
                "learner/outside_clip_first": (off > self.table[3, rows]).double().mean(),
                "learner/kl_behaviour": kl,
                "learner/advantage_mean": advantages.mean(),
                "learner/advantage_std": advantages.std(unbiased=False),
                "learner/value_mean": prepared.values[rows].mean(),
                "learner/target_mean": targets.mean(),
                "learner/explained_variance": explained_variance(prepared.values[rows], targets),
            }
        numbers = {key: float(value) for key, value in metrics.items()}
        numbers |= {"learner/lr": self.lr, "learner/clip_param": self.clip}
        # The explained variance of constant targets is not a number, and then not reported.
        return {key: value for key, value in numbers.items() if math.isfinite(value)}

    def _ratio_before_first_step(self, off: Tensor, trained: Tensor) -> Tensor | None:
        """Largest |ratio - 1| over rows of lag 0: in the pass over the batch, and in the first minibatch."""
        fresh = self.rows[self.lag == 0]
        if len(fresh) == 0:
            return None
        in_pass = _ratio_off(self.prepared.prox_logp[fresh], self.prepared.logp[fresh]).max()
        in_step = off[torch.isin(trained, fresh)]
        return torch.maximum(in_pass, in_step.max()) if len(in_step) else in_pass

    def _cause(
        self,
        inputs: Tensor,
        values: Tensor,
        logp: Tensor,
        policy_loss: Tensor,
        vf_loss: Tensor,
        entropy: Tensor,
        kl: Tensor | None,
    ) -> str:
        """Names the first number of a skipped step that is not finite, in the order of computation."""
        named = {
            "distribution inputs of the network": inputs,
            "value of the network": values,
            "log-probability of the actions": logp,
            "policy loss": policy_loss,
            "value loss": vf_loss,
            "entropy": entropy,
            "KL divergence": kl,
        }
        for name, tensor in named.items():
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                return name
        return self.learner.non_finite_gradient() or "gradient norm"

    def _index(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self.learner.device)


def _ratio_off(logp: Tensor, logp_old: Tensor) -> Tensor:
    """|ratio - 1| per row."""
    return log_ratio(logp, logp_old).exp().sub(1.0).abs()


def _set(value: T | None) -> T:
    """A resolved setting (checked when the learner was made)."""
    assert value is not None
    return value
