"""Action distributions as functions of the policy head's outputs.

Every class holds sizes only; the numbers come in as tensors. Shapes: inputs [N, P], actions [N, A], mask
[N, P]; sample and mode give [N, A]; log_prob, entropy and kl give [N], sums over the A parts. A mask is True
(or non-zero) where a choice is allowed; a forbidden choice has probability exactly 0, whatever its logit is
(NaN included). Log-probabilities come from log-softmax and log-sigmoid, never from log(prob). float64 inputs
stay float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Distribution(ABC):
    """What all kinds have in common.

    inputs_size: P, numbers per row that the policy head gives; action_width: A; action_dtype: int64 or
    float32.
    """

    inputs_size: int
    action_width: int
    action_dtype: torch.dtype

    @abstractmethod
    def sample(self, inputs: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        """Actions [N, A], drawn with the generator (which may live on another device than the inputs)."""

    @abstractmethod
    def mode(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The deterministic action [N, A]."""

    @abstractmethod
    def log_prob(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-probability (density) of the action rows, [N]."""

    @abstractmethod
    def entropy(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy, [N]."""

    @abstractmethod
    def kl(self, p_inputs: Tensor, q_inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """KL(p‖q), [N]; the same mask holds on both sides."""

    def sampled_entropy(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """What an entropy bonus rewards, [N]: the entropy, or, where that has no closed form, an estimate of it from
        action rows of (about) this distribution."""
        return self.entropy(inputs, mask)

    def sample_with_log_prob(
        self, inputs: Tensor, generator: torch.Generator, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`sample` and the `log_prob` of what was drawn, sharing the work: the hot path of inference."""
        actions = self.sample(inputs, generator, mask)
        return actions, self.log_prob(inputs, actions, mask)

    def mode_with_log_prob(self, inputs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`mode` and its `log_prob`."""
        actions = self.mode(inputs, mask)
        return actions, self.log_prob(inputs, actions, mask)

    def _check(self, inputs: Tensor, actions: Tensor | None = None) -> None:
        if inputs.ndim != 2 or inputs.shape[1] != self.inputs_size:
            raise ValueError(f"{type(self).__name__} needs inputs [N, {self.inputs_size}], got {list(inputs.shape)}")
        if actions is not None and (
            actions.ndim != 2 or actions.shape[0] != inputs.shape[0] or actions.shape[1] != self.action_width
        ):
            raise ValueError(
                f"{type(self).__name__} needs actions [{inputs.shape[0]}, {self.action_width}], "
                f"got {list(actions.shape)}"
            )

    def _check_mask(self, inputs: Tensor, mask: Tensor) -> Tensor:
        if mask.shape != inputs.shape:
            raise ValueError(f"mask has shape {list(mask.shape)}, the inputs {list(inputs.shape)}")
        return mask if mask.dtype == torch.bool else mask != 0


class MultiCategorical(Distribution):
    """Independent categoricals (MultiDiscrete): inputs are Σ nvec logits, concatenated; actions int64.

    The parts are worked on side by side as [N, A, max(nvec)]; shorter parts are filled up with impossible
    choices.
    """

    action_dtype = torch.int64

    def __init__(self, nvec: Sequence[int]) -> None:
        if not nvec or min(nvec) < 1:
            raise ValueError(f"every part needs at least one choice, got nvec {list(nvec)}")
        self.nvec = tuple(int(n) for n in nvec)
        self.inputs_size = sum(self.nvec)
        self.action_width = len(self.nvec)
        self._widest = max(self.nvec)
        self._equal = min(self.nvec) == self._widest
        index: list[int] = []
        start = 0
        for n in self.nvec:
            index += [*range(start, start + n), *[self.inputs_size] * (self._widest - n)]
            start += n
        # Positions of the filled layout in the concatenated one; the last position stands for the filling.
        self._index = {torch.device("cpu"): torch.tensor(index)}

    def _parts(self, rows: Tensor, filling: float) -> Tensor:
        """[N, Σ nvec] -> [N, A, max(nvec)]."""
        if not self._equal:
            index = self._index.get(rows.device)
            if index is None:
                index = self._index[rows.device] = self._index[torch.device("cpu")].to(rows.device)
            rows = F.pad(rows, (0, 1), value=filling).index_select(1, index)
        return rows.view(-1, self.action_width, self._widest)

    def _logits(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        self._check(inputs)
        lowest = torch.finfo(inputs.dtype).min
        if mask is not None:
            mask = self._check_mask(inputs, mask)
            allowed = self._parts(mask, False).any(-1)
            if not bool(allowed.all()):
                row, part = (~allowed).nonzero()[0].tolist()
                raise ValueError(f"the mask forbids every choice of part {part} in row {row}")
            inputs = inputs.masked_fill(~mask, lowest)
        return self._parts(inputs, lowest)

    def sample(self, inputs: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        return self._draw(F.log_softmax(self._logits(inputs, mask), -1), generator).squeeze(-1)

    def _draw(self, logp: Tensor, generator: torch.Generator) -> Tensor:
        """Inverse of the cumulated probabilities at uniform numbers: [N, A, n] -> [N, A, 1].

        Scaling by the last sum (1 up to rounding) keeps the number strictly below it, so that no choice of
        probability 0 can be drawn, not even by rounding.
        """
        cdf = logp.exp().cumsum(-1)
        uniform = torch.rand(
            (logp.shape[0], logp.shape[1], 1), generator=generator, dtype=logp.dtype, device=generator.device
        )
        if uniform.device != logp.device:
            uniform = uniform.to(logp.device)
        return torch.searchsorted(cdf, uniform * cdf[..., -1:], right=True)

    def mode(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._logits(inputs, mask).argmax(-1)  # the lowest index on ties

    def log_prob(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        self._check(inputs, actions)
        logp = F.log_softmax(self._logits(inputs, mask), -1)
        return logp.gather(-1, actions.unsqueeze(-1)).sum((1, 2))

    def sample_with_log_prob(
        self, inputs: Tensor, generator: torch.Generator, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logp = F.log_softmax(self._logits(inputs, mask), -1)
        actions = self._draw(logp, generator)
        return actions.squeeze(-1), logp.gather(-1, actions).sum((1, 2))

    def mode_with_log_prob(self, inputs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logp = F.log_softmax(self._logits(inputs, mask), -1)
        best, actions = logp.max(-1)
        return actions, best.sum(-1)

    def entropy(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        logp = F.log_softmax(self._logits(inputs, mask), -1)
        return -self._expect(logp, logp)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        p = F.log_softmax(self._logits(p_inputs, mask), -1)
        q = F.log_softmax(self._logits(q_inputs, mask), -1)
        return self._expect(p, p - q)

    @staticmethod
    def _expect(logp: Tensor, values: Tensor) -> Tensor:
        """Σ p·values, where choices of probability 0 count 0 however large the value is."""
        p = logp.exp()
        return torch.where(p > 0, p * values, 0.0).sum((1, 2))


class Categorical(MultiCategorical):
    """One choice among n (Discrete): inputs are n logits, actions int64 [N, 1]."""

    def __init__(self, n: int) -> None:
        super().__init__([n])


class Bernoulli(Distribution):
    """n independent bits (MultiBinary): inputs are n logits of "1", actions int64 [N, n].

    A masked bit is held at 0.
    """

    action_dtype = torch.int64

    def __init__(self, n: int) -> None:
        self.inputs_size = self.action_width = n

    def _logits(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        self._check(inputs)
        if mask is not None:
            inputs = inputs.masked_fill(~self._check_mask(inputs, mask), torch.finfo(inputs.dtype).min)
        return inputs

    def sample(self, inputs: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        probs = torch.sigmoid(self._logits(inputs, mask))
        uniform = torch.rand(probs.shape, generator=generator, dtype=probs.dtype, device=generator.device)
        return (uniform.to(probs.device) < probs).long()

    def mode(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return (self._logits(inputs, mask) > 0).long()

    def log_prob(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        self._check(inputs, actions)
        logits = self._logits(inputs, mask)
        return (actions.to(logits.dtype) * logits - _softplus(logits)).sum(-1)

    def entropy(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        logits = self._logits(inputs, mask)
        return (_softplus(logits) - logits * torch.sigmoid(logits)).sum(-1)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        p, q = self._logits(p_inputs, mask), self._logits(q_inputs, mask)
        return (torch.sigmoid(p) * (p - q) - _softplus(p) + _softplus(q)).sum(-1)


class DiagGaussian(Distribution):
    """n independent normals (Box): inputs are n means and n log standard deviations, actions float [N, n].

    The log standard deviation is clamped to [-20, 2]. There is nothing to mask: `mask` must be None.
    """

    action_dtype = torch.float32

    def __init__(self, n: int) -> None:
        self.action_width = n
        self.inputs_size = 2 * n

    def _moments(self, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        self._check(inputs)
        if mask is not None:
            raise ValueError("continuous actions cannot be masked")
        mean, log_std = inputs.split(self.action_width, 1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def sample(self, inputs: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        mean, log_std = self._moments(inputs, mask)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=generator.device)
        return torch.addcmul(mean, log_std.exp(), noise.to(mean.device))

    def mode(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._moments(inputs, mask)[0]

    def log_prob(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        self._check(inputs, actions)
        mean, log_std = self._moments(inputs, mask)
        z = (actions - mean) * torch.exp(-log_std)
        return -(0.5 * z * z + log_std).sum(-1) - self.action_width * _HALF_LOG_2PI

    def entropy(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._moments(inputs, mask)[1].sum(-1) + self.action_width * (0.5 + _HALF_LOG_2PI)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        p_mean, p_log_std = self._moments(p_inputs, mask)
        q_mean, q_log_std = self._moments(q_inputs, mask)
        spread = torch.exp(2 * (p_log_std - q_log_std))
        shift = (p_mean - q_mean) * torch.exp(-q_log_std)
        return (q_log_std - p_log_std + 0.5 * (spread + shift * shift - 1)).sum(-1)


class SquashedGaussian(DiagGaussian):
    """tanh of a normal, stretched to finite bounds. Action rows are the values u before tanh: `to_bounds`.

    The KL is that of the base normals: an invertible map does not change it.
    """

    QUADRATURE_NODES = 64

    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
        super().__init__(len(low))
        if len(high) != len(low) or not all(a < b and math.isfinite(b - a) for a, b in zip(low, high, strict=True)):
            raise ValueError(f"needs finite bounds with low < high, got low {list(low)} and high {list(high)}")
        self._low = torch.tensor(low, dtype=torch.float64)
        self._half = (torch.tensor(high, dtype=torch.float64) - self._low) / 2
        self._log_half = float(self._half.log().sum())

    def to_bounds(self, actions: Tensor) -> Tensor:
        """u [N, n] -> what the environment gets: low + half·(tanh(u) + 1)."""
        return self._low.to(actions) + self._half.to(actions) * (torch.tanh(actions) + 1)

    def log_prob(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().log_prob(inputs, actions, mask) - _log_tanh_slope(actions).sum(-1) - self._log_half

    def entropy(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """No closed form: Gauss–Hermite quadrature of E[log(1 - tanh²u)]; relative error below 1e-6."""
        mean, log_std = self._moments(inputs, mask)
        nodes, weights = (x.to(mean) for x in _hermite_rule(self.QUADRATURE_NODES))
        u = mean.unsqueeze(-1) + math.sqrt(2) * log_std.exp().unsqueeze(-1) * nodes
        slope = (_log_tanh_slope(u) * weights).sum((1, 2))
        return super().entropy(inputs, mask) + slope + self._log_half

    def sampled_entropy(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy of the normal plus log(1 - tanh²u) at the sampled u; the gradient is taken along u = mean + std·ε,
        without which a bonus would only ever widen the normal."""
        self._check(inputs, actions)
        mean, log_std = self._moments(inputs, mask)
        std = log_std.exp()
        noise = ((actions - mean) / std).detach()
        return super().entropy(inputs, mask) + _log_tanh_slope(mean + std * noise).sum(-1) + self._log_half


def _softplus(x: Tensor) -> Tensor:
    # torch's own softplus turns into the identity above 20, an error of 2e-9.
    return -F.logsigmoid(-x)


def _log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh²u) without cancellation."""
    return 2 * (math.log(2) - u - _softplus(-2 * u))


def _hermite_rule(n: int) -> tuple[Tensor, Tensor]:
    """Nodes x, weights w [n], float64: E[f(z)] = Σ w f(√2·x) for a standard normal z (Golub and Welsch)."""
    off = torch.sqrt(torch.arange(1, n, dtype=torch.float64) / 2)
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, vectors[0] ** 2
