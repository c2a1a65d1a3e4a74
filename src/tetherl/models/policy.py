"""The policy: spaces and a model configuration made into a network that acts and can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from tetherl.models import init
from tetherl.models.config import ModelConfig
from tetherl.models.custom import CustomEncoder
from tetherl.models.defaults import resolve_model
from tetherl.models.heads import distribution_of, distribution_order
from tetherl.models.normalize import ObservationNormalizer
from tetherl.models.previous import PreviousInputs
from tetherl.models.trunk import Trunk
from tetherl.models.weights import copy_weights, load_weights
from tetherl.spaces import ActionCodec, ObservationCodec


class PolicyOutput(NamedTuple):
    """What `forward` gives for N rows in C chunks."""

    dist: Tensor
    """[N, P] distribution inputs."""
    values: Tensor
    """[N] values in the critic's own scale; `Policy.denormalize` gives reward units."""
    state: Tensor | None
    """[C, S] recurrent state after each chunk's last row; None without recurrence."""


class ActResult(NamedTuple):
    """What `act` gives for B decisions."""

    actions: np.ndarray
    """[B, A] int64 or float32: action rows as sampled, before any clipping, scaling or tanh."""
    logp: np.ndarray
    """[B] float32: their log-probability."""
    dist: np.ndarray
    """[B, P] float32: the distribution inputs."""
    state: np.ndarray | None
    """[B, S] float32: the recurrent state for the next decision; None without recurrence."""


class Policy(nn.Module):
    """Encoders, optional recurrent core, policy head and value head for one pair of spaces.

    N rows, C chunks, A the width of an action row, P the number of distribution inputs, S a state's size.
    The same seed gives the same weights; the global torch random state is neither used nor changed.

    Raises ConfigError when the configuration does not fit the spaces.
    """

    value_count: Tensor
    value_mean: Tensor
    value_std: Tensor
    dist_order: Tensor | None

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        config: ModelConfig,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.codec = ObservationCodec(observation_space)
        self.actions = ActionCodec(action_space, squash=config.action_distribution == "tanh")
        self.config = resolve_model(config, self.codec.leaves)
        self.dist = distribution_of(self.actions)
        self.is_recurrent = config.core is not None
        self.uses_prev_action = bool(self.config.lstm_use_prev_action)
        self.uses_prev_reward = config.lstm_use_prev_reward

        generator = torch.Generator().manual_seed(seed)
        self.previous: PreviousInputs | None = None
        if self.uses_prev_action or self.uses_prev_reward:
            self.previous = PreviousInputs(self.actions, self.uses_prev_action, self.uses_prev_reward)
        width = self.previous.width if self.previous is not None else 0
        self.normalizer: ObservationNormalizer | None = None
        if config.normalize_observations:
            self.normalizer = ObservationNormalizer(self.codec.leaves)

        def trunk() -> Trunk:
            custom = None
            if config.custom is not None:
                custom = CustomEncoder(observation_space, action_space, self.config, generator)
            return Trunk(self.codec.leaves, width, self.config, generator, custom)

        self.trunk = trunk()
        self.value_trunk: Trunk | None = None if self.config.vf_share_layers else trunk()
        self.state_size = self.trunk.state_size * (1 if self.value_trunk is None else 2)

        self.log_std: nn.Parameter | None = None
        deviations = sum(part.width for part in self.actions.parts if part.kind == "box")
        if deviations:
            self.log_std = nn.Parameter(torch.full((deviations,), float(config.log_std_init)))
        outputs = self.dist.inputs_size - deviations
        self.policy_head = init.dense(self.trunk.width, outputs, generator, init.POLICY_GAIN)
        self.register_buffer("dist_order", distribution_order(self.actions), persistent=False)
        self.value_head = init.dense(self.trunk.width, 1, generator, init.VALUE_GAIN)
        # Running moments of the value targets; 0 and 1 (values are in reward units) until the first update.
        for name, value in (("value_count", 0.0), ("value_mean", 0.0), ("value_std", 1.0)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))
        # Acting and learning must give the same numbers: a custom encoder's dropout would make old ratios wrong.
        self.eval()

    # ---------------------------------------------------------------- learning

    def forward(
        self,
        obs: dict[str, Tensor],
        prev_action: Tensor,
        prev_reward: Tensor,
        has_prev: Tensor,
        lengths: list[int] | None = None,
        state: Tensor | None = None,
    ) -> PolicyOutput:
        """Distribution inputs and values of N rows.

        obs: {leaf: [N, *leaf]} in the space's own dtypes; prev_action [N, A]; prev_reward [N]; has_prev [N]
        bool, False at the first step of an episode. Rows are packed: chunk after chunk, N = sum(lengths), no
        padding. state [C, S] is fed at each chunk's first row (None: zeros). Without recurrence the last two
        are ignored.
        """
        dtype = self.policy_head.weight.dtype
        if self.normalizer is not None:
            obs = self.normalizer(obs, dtype)
        previous = None
        if self.previous is not None:
            previous = self.previous(prev_action, prev_reward, has_prev, dtype)
        own, other = self._states(lengths, state, len(has_prev))
        features, own = self.trunk(obs, previous, lengths, own, dtype)
        value_features = features
        if self.value_trunk is not None:
            value_features, other = self.value_trunk(obs, previous, lengths, other, dtype)
        return PolicyOutput(self._dist(features), self.value_head(value_features).squeeze(-1), _join(own, other))

    def normalize(self, values: Tensor) -> Tensor:
        """From reward units to the critic's scale."""
        return (values - self.value_mean.to(values.dtype)) / self.value_std.to(values.dtype)

    def denormalize(self, values: Tensor) -> Tensor:
        """From the critic's scale (`PolicyOutput.values`) to reward units."""
        return values * self.value_std.to(values.dtype) + self.value_mean.to(values.dtype)

    def update_value_stats(self, targets: Tensor) -> None:
        """Take value targets (reward units, any shape) into the moments; see `merge_value_moments`."""
        targets = targets.detach().double()
        if targets.numel():
            mean = targets.mean()
            self.merge_value_moments(targets.numel(), float(mean), float(((targets - mean) ** 2).sum()))

    @torch.no_grad()
    def merge_value_moments(self, count: float, mean: float, m2: float) -> None:
        """Merge the moments of a batch of value targets: their number, mean, and sum of squared deviations.

        The value head is rescaled so that denormalised values stay what they were (van Hasselt et al. 2016,
        arXiv:1602.07714). The first batch is different: nothing learned is there to preserve, so the
        statistics are only set, and the critic starts at the targets' mean, not many deviations away from it.
        """
        if count <= 0:
            return
        old_count, old_mean, old_std = (float(b) for b in (self.value_count, self.value_mean, self.value_std))
        total = old_count + count
        delta = mean - old_mean if old_count else 0.0
        new_mean = old_mean + delta * count / total if old_count else mean
        old_m2 = old_std**2 * old_count
        variance = (old_m2 + m2 + delta**2 * old_count * count / total) / total
        # The floor follows the mean: nearly constant targets would otherwise need a huge gain.
        new_std = max(variance**0.5, 1e-4, 1e-2 * abs(new_mean))
        if old_count:
            self.value_head.weight.mul_(old_std / new_std)
            self.value_head.bias.mul_(old_std).add_(old_mean - new_mean).div_(new_std)
        for buffer, value in (
            (self.value_count, total),
            (self.value_mean, new_mean),
            (self.value_std, new_std),
        ):
            buffer.fill_(value)

    # ---------------------------------------------------------------- acting

    @torch.inference_mode()
    def act(
        self,
        obs: dict[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        has_prev: np.ndarray,
        state: np.ndarray | None,
        *,
        explore: bool,
        generator: torch.Generator,
        mask: np.ndarray | None = None,
    ) -> ActResult:
        """Choose actions for B observations, one step each.

        obs: {leaf: [B, *leaf]}; prev_action [B, A]; prev_reward [B] float32; has_prev [B] bool; state [B, S]
        float32 or None (zeros). `explore` samples with `generator`; else the most likely action is taken.
        mask [B, P] bool: choices that are allowed, at least one in each part of an action; None: all.
        Values are not computed: what the critic thinks at acting time is never used.
        """
        weight = self.policy_head.weight
        device, dtype = weight.device, weight.dtype
        inputs = {name: _tensor(array, device) for name, array in obs.items()}
        if self.normalizer is not None:
            inputs = self.normalizer(inputs, dtype)
        previous, lengths, own, other = None, None, None, None
        if self.previous is not None:
            previous = self.previous(
                _tensor(prev_action, device), _tensor(prev_reward, device), _tensor(has_prev, device), dtype
            )
        if self.is_recurrent:
            lengths = [1] * len(has_prev)
            given = None if state is None else _tensor(state, device)
            own, other = self._states(lengths, given, len(has_prev))
        features, own = self.trunk(inputs, previous, lengths, own, dtype)
        if self.value_trunk is not None and self.is_recurrent:
            # Its memory has to live through the episode as well: learning starts from the stored state.
            _, other = self.value_trunk(inputs, previous, lengths, other, dtype)
        # Sampling happens on the CPU wherever the network is: the same seed, the same actions.
        dist = self._dist(features).cpu()
        allowed = None if mask is None else torch.from_numpy(mask)
        if explore:
            actions, logp = self.dist.sample_with_log_prob(dist, generator, allowed)
        else:
            actions, logp = self.dist.mode_with_log_prob(dist, allowed)
        joined = _join(own, other)
        return ActResult(actions.numpy(), logp.numpy(), dist.numpy(), None if joined is None else joined.cpu().numpy())

    # ---------------------------------------------------------------- weights

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of all parameters (float32) and value statistics (float64: nothing is lost), by name."""
        return copy_weights(self)

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set what `weights` gave, all or nothing. CheckpointError names the first that does not fit."""
        load_weights(self, weights)

    # ---------------------------------------------------------------- parts

    def _dist(self, features: Tensor) -> Tensor:
        out = self.policy_head(features)
        if self.log_std is None:
            return out
        out = torch.cat([out, self.log_std.expand(len(out), -1)], -1)
        return out if self.dist_order is None else out.index_select(1, self.dist_order)

    def _states(
        self, lengths: list[int] | None, state: Tensor | None, rows: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """The states of the policy's core and of the value function's own one (each [C, 2H], or None)."""
        if not self.is_recurrent:
            return None, None
        if lengths is None or sum(lengths) != rows or (lengths and min(lengths) < 1):
            raise ValueError(
                f"a recurrent policy needs the lengths of its chunks, each at least 1, {rows} rows in all;"
                f" got {lengths}"
            )
        weight = self.policy_head.weight
        if state is None:
            state = weight.new_zeros(len(lengths), self.state_size)
        elif state.shape != (len(lengths), self.state_size):
            raise ValueError(
                f"states for {len(lengths)} chunks must be [{len(lengths)}, {self.state_size}]; got {list(state.shape)}"
            )
        state = state.to(weight.dtype)
        size = self.trunk.state_size
        return state[:, :size], (state[:, size:] if self.value_trunk is not None else None)


def _join(own: Tensor | None, other: Tensor | None) -> Tensor | None:
    return own if own is None or other is None else torch.cat([own, other], -1)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    # torch has no read-only tensors, and warns about such arrays; views of received messages are read-only.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
