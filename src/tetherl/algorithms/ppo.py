"""Proximal policy optimisation, for fresh and for late experience: all that is PPO.

    L = -⟨w·min(q·Â, clip(q, 1 - ε, 1 + ε)·Â)⟩ + c_v·⟨(V - target)²⟩ - c_e·⟨H⟩ + β·⟨KL(prox‖new)⟩

| loss       | q is the ratio to     | ε of a row      | w            |
|------------|-----------------------|-----------------|--------------|
| lag_scaled | the policy that acted | grows with lag  | 1            |
| plain      | the policy that acted | the same for all| 1            |
| decoupled  | prox                  | the same for all| prox / acted |

prox is the policy at the start of the update. For rows of lag 0 it is the one that acted, and the three losses are the
same. ⟨·⟩ is the mean over valid rows.
Schulman et al. 2017 (arXiv:1707.06347); decoupled: Hilton et al. 2021 (arXiv:2110.00641); advantages: Schulman et al.
2016 (arXiv:1506.02438).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tetherl.algorithms.alarms import alarms
from tetherl.algorithms.config import AlgorithmConfig
from tetherl.algorithms.learner import Learner, LearnResult
from tetherl.algorithms.parallel import Reduction
from tetherl.algorithms.ppo_update import Update, resolved
from tetherl.algorithms.preparation import Recipe, first_non_finite, prepare
from tetherl.algorithms.scaling import REWARD_CLIP, RewardScaling, take_observations
from tetherl.data.batch import assemble
from tetherl.data.fragment import Fragment
from tetherl.errors import CheckpointError, ConfigError
from tetherl.models.policy import Policy

_RESOLVED = ("minibatch_size", "epochs", "lr", "max_lag", "entropy_coeff", "use_kl_loss", "normalize_values")


class PPOLearner(Learner):
    """Turns fragments into better weights.

    config must be resolved: none of minibatch_size, epochs, lr, max_lag, entropy_coeff, use_kl_loss and
    normalize_values may be None (ConfigError). max_seq_len: rows per chunk of a recurrent policy. reduction: see
    `Learner`.
    """

    def __init__(
        self,
        policy: Policy,
        config: AlgorithmConfig,
        *,
        max_seq_len: int,
        seed: int,
        device: str = "cpu",
        reduction: Reduction | None = None,
    ) -> None:
        for key in _RESOLVED:
            if getattr(config, key) is None:
                raise ConfigError(f"algorithm.{key} is not set; the learner needs the resolved configuration")
        super().__init__(
            policy,
            adam_eps=config.adam_eps,
            grad_clip=config.grad_clip,
            seed=seed,
            device=device,
            reduction=reduction,
        )
        self.config = config
        self.recipe = Recipe(
            gamma=config.gamma,
            lam=config.lambda_,
            max_seq_len=max_seq_len,
            device=self.device,
            burn_in=config.burn_in,
            stored_states=config.state_source == "stored",
            reward_scale=config.reward_scale,
            reward_clip=config.reward_clip,
            reduction=reduction,
        )
        self.kl_coeff = config.kl_coeff if config.use_kl_loss else 0.0
        self._scaling = RewardScaling(config.gamma) if config.reward_scaling else None
        self._alarms: set[str] = set()  # those that are on: each is said once
        self.synchronise()

    def update(self, fragments: list[Fragment], *, version: int, steps_trained: int) -> LearnResult:
        """See `Learner.update`. Rows that are late, not the policy's, or in a fragment with a number that is
        not finite are not trained on and counted: "stale", "not_policy", "quarantined"."""
        batch, kept, dropped = assemble(
            fragments,
            version=version,
            max_lag=resolved(self.config.max_lag),
            state_size=self.policy.state_size,
        )
        if batch is None:
            return LearnResult(self._counters(0), 0, dropped, self._new_alarms({}, 0, dropped))
        if self._scaling is not None:
            scale = self._scaling.take(batch, kept)
            self.recipe = replace(self.recipe, reward_scale=scale, reward_clip=REWARD_CLIP)
        prepared = prepare(self.policy, batch, self.recipe)
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
        metrics = Update(self, prepared, valid, steps_trained).run()
        take_observations(self.policy, batch, prepared.finite)
        metrics["learner/reward_scale"] = self.recipe.reward_scale
        trained = int(valid.sum())
        metrics["learner/valid_fraction"] = trained / (trained + sum(dropped.values()))
        metrics["learner/quarantined_fragments"] = float(len(broken))
        warnings += self._new_alarms(metrics, trained, dropped)
        metrics["learner/alarms"] = float(len(self._alarms))
        self.verify(kl_coeff=self.kl_coeff, lr=metrics["learner/lr"], entropy_coeff=metrics["learner/entropy_coeff"])
        return LearnResult(metrics | self._counters(metrics["learner/steps"]), trained, dropped, warnings)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays, meta = super().state()
        scaling = {} if self._scaling is None else {"return_moments": self._scaling.state()}
        return arrays, meta | {"kl_coeff": self.kl_coeff} | scaling

    def load_state(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        if "kl_coeff" not in meta:
            raise CheckpointError("learner state: kl_coeff is missing; the checkpoint is of another version")
        super().load_state(arrays, meta)
        self.kl_coeff = float(meta["kl_coeff"])
        if self._scaling is not None:
            self._scaling.load_state(meta.get("return_moments"))

    def _new_alarms(self, metrics: dict[str, float], trained: int, dropped: dict[str, int]) -> list[str]:
        found = alarms(metrics, self.config, trained, dropped)
        new = [text for name, text in found.items() if name not in self._alarms]
        self._alarms = set(found)
        return new

    def _counters(self, steps: float) -> dict[str, float]:
        return {
            "learner/steps": steps,
            "learner/skipped_steps": float(self._skipped_steps),
            "learner/kl_coeff": self.kl_coeff,
        }
