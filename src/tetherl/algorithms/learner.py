"""What every learner needs, whatever its loss: optimizer steps that survive bad numbers, and exact state."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tetherl.algorithms.export import policy_weights
from tetherl.algorithms.parallel import Reduction, check_agreement, checksum
from tetherl.data.fragment import Fragment
from tetherl.errors import CheckpointError, TrainingError
from tetherl.models.policy import Policy

MAX_CONSECUTIVE_SKIPS = 10
VERIFY_WEIGHTS_EVERY = 100
"""Updates between two comparisons of the weights of several learners."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class LearnResult:
    """What one update did. `trained + sum(dropped) == rows given`.

    metrics: flat numbers, for example {"learner/policy_loss": -0.012, "lag/max": 1.0}.
    dropped: rows that were given but not trained on, by reason ("stale", "not_policy", "quarantined").
    warnings: plain sentences about rows that were left out because a number was not finite, and about experience
    that has become too old or too different to learn well from (said once, and again after it was better).
    """

    metrics: dict[str, float]
    trained: int
    dropped: dict[str, int]
    warnings: list[str] = field(default_factory=list)


class Learner(ABC):
    """Owns the policy's weights during learning: Adam, gradient clipping, shuffling, non-finite handling.

    With a `reduction` it is one of several learners that make one update together, each with its slice of every
    minibatch. All get the same calls with the same arguments; `state` of any of them is that of all.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        adam_eps: float,
        grad_clip: float | None,
        seed: int,
        device: str,
        reduction: Reduction | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.policy = policy.to(self.device)
        self.policy.eval()
        learned = [(name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad]
        self._names = [name for name, _ in learned]
        self._parameters = [parameter for _, parameter in learned]
        self._grad_clip = math.inf if grad_clip is None else grad_clip
        self._optimizer = torch.optim.Adam(self._parameters, lr=0.0, eps=adam_eps, fused=True)
        self.generator = torch.Generator().manual_seed(seed)
        self._skipped_steps = 0
        self._consecutive_skips = 0
        self.reduction = reduction
        self._verifications = 0

    @abstractmethod
    def update(self, fragments: list[Fragment], *, version: int, steps_trained: int) -> LearnResult:
        """Train on the fragments once.

        version: the learner's policy version, that of the current weights; a row's lag is version minus its
        own. steps_trained: env steps trained on before; drives the schedules. Without a row to train on no
        weight changes. Raises TrainingError after 10 skipped steps in a row.
        """

    @property
    def part(self) -> tuple[int, int]:
        """(which learner this is, of how many)."""
        return (0, 1) if self.reduction is None else (self.reduction.rank, self.reduction.size)

    def backward(self, loss: Tensor | None, numbers: Tensor) -> Tensor:
        """Gradients of the loss; returns `numbers`.

        With several learners both become sums over all of them: loss and numbers are then this learner's share,
        divided by what belongs to all. loss None: this learner has no row of the minibatch.
        """
        self._optimizer.zero_grad(set_to_none=True)
        if loss is not None:
            loss.backward()
        if self.reduction is None:
            return numbers
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat = torch.cat([*(g.reshape(-1) for g in gradients), numbers])
        self.reduction.sum(flat)
        *summed, numbers = flat.split([*(g.numel() for g in gradients), len(numbers)])
        for parameter, gradient, values in zip(self._parameters, gradients, summed, strict=True):
            parameter.grad = gradient.copy_(values.view(gradient.shape))
        return numbers

    def step(self, loss: Tensor, *, lr: float) -> Tensor | None:
        """One optimizer step along the gradients. Returns their norm before clipping, or None when nothing was
        changed because loss or gradient is not finite (the caller then says which number it was to `skip`)."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip)
        if not bool(torch.isfinite(loss + norm)):
            return None
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._consecutive_skips = 0
        return norm

    def synchronise(self) -> None:
        """Take over learner 0's state: weights, optimizer, random state, counters. Nothing to do for one alone."""
        if self.reduction is None:
            return
        arrays, meta = self.reduction.broadcast(self.state() if self.reduction.rank == 0 else None)
        self.load_state(arrays, meta)
        self._verifications = 0

    def verify(self, **numbers: float) -> None:
        """Check that all learners have the same numbers; now and then also that they have the same weights.

        TrainingError if not.
        """
        if self.reduction is None:
            return
        numbers["the shuffling"] = float(zlib.crc32(self.generator.get_state().numpy().tobytes()))
        if self._verifications % VERIFY_WEIGHTS_EVERY == 0:
            numbers["the checksum of the weights"] = checksum(self.policy)
        self._verifications += 1
        check_agreement(self.reduction, numbers, self.device)

    def skip(self, cause: str) -> None:
        """Count a step that was not made; raise when it has happened too often in a row."""
        self._skipped_steps += 1
        self._consecutive_skips += 1
        if self._consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            raise TrainingError(
                f"{self._consecutive_skips} optimizer steps in a row were skipped for numbers that are not "
                f"finite; the first in the last one: {cause}. The weights are those before these steps. "
                "Check rewards and observations for NaN, infinite or very large values; a lower "
                "algorithm.lr, or algorithm.grad_clip if it is off, may help."
            )

    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose gradient is not finite."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return f"gradient of {name}"
        return None

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Everything an exact continuation needs, as (arrays, JSON-able meta). Arrays are copies."""
        arrays = {f"policy/{k}": v for k, v in self.policy.weights().items()}
        steps = 0
        for name, parameter in zip(self._names, self._parameters, strict=True):
            own = self._optimizer.state.get(parameter)
            if own:
                steps = int(own["step"])
                arrays |= {f"adam/{k}/{name}": own[k].detach().cpu().numpy().copy() for k in _MOMENTS}
        arrays["shuffle"] = self.generator.get_state().numpy().copy()
        meta = {
            "adam_steps": steps,
            "skipped_steps": self._skipped_steps,
            "consecutive_skips": self._consecutive_skips,
        }
        return arrays, meta

    def load_state(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Inverse of `state`. Raises CheckpointError naming the first entry that does not fit."""
        adam_steps = int(_entry(meta, "adam_steps"))
        moments: list[dict[str, Tensor]] = []
        if adam_steps:
            for name, parameter in zip(self._names, self._parameters, strict=True):
                moments.append({k: _moment(arrays, f"adam/{k}/{name}", parameter) for k in _MOMENTS})
        shuffle = torch.from_numpy(np.array(_entry(arrays, "shuffle"), dtype=np.uint8))
        counters = [int(_entry(meta, key)) for key in ("skipped_steps", "consecutive_skips")]
        self.policy.load_weights(policy_weights(arrays))
        self._optimizer.state.clear()
        for parameter, own in zip(self._parameters, moments, strict=False):
            step = torch.tensor(float(adam_steps), device=self.device)
            self._optimizer.state[parameter] = {"step": step, **own}
        self.generator.set_state(shuffle)
        self._skipped_steps, self._consecutive_skips = counters


def _moment(arrays: dict[str, np.ndarray], key: str, parameter: Tensor) -> Tensor:
    array = _entry(arrays, key)
    if tuple(array.shape) != tuple(parameter.shape):
        raise CheckpointError(
            f"learner state: {key} has shape {tuple(array.shape)}, this model expects "
            f"{tuple(parameter.shape)}; the checkpoint belongs to another model or other spaces"
        )
    return torch.from_numpy(np.array(array)).to(parameter)


def _entry(mapping: dict[str, Any], key: str) -> Any:
    if key not in mapping:
        raise CheckpointError(f"learner state: {key} is missing; the checkpoint is of another version")
    return mapping[key]
