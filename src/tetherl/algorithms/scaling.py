"""Statistics that move with each batch: of returns, which scale the rewards, and of observations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tetherl.data.batch import SampleBatch
from tetherl.data.fragment import Fragment
from tetherl.errors import CheckpointError
from tetherl.models.policy import Policy
from tetherl.ops.normalize import ReturnScaler

REWARD_CLIP = 10.0


class RewardScaling:
    """One constant scale per batch: 1 / deviation of the running discounted return, over all batches so far.

    The running return goes on from fragment to fragment of an episode: each carries what came before its first row.
    So neither the order of fragments nor a lost one changes what the others contribute.
    """

    def __init__(self, gamma: float) -> None:
        self._scaler = ReturnScaler(gamma, clip=REWARD_CLIP)

    def take(self, batch: SampleBatch, fragments: list[Fragment]) -> float:
        """Count the rows of a batch, made of these fragments; returns what its rewards are to be multiplied by."""
        t, b = batch.position_in_fragment, batch.fragment_of_row
        shape = (int(batch.lengths.max()), len(batch.lengths))
        rewards, mask = np.zeros(shape), np.zeros(shape, bool)
        rewards[t, b], mask[t, b] = batch.rewards, True
        mask &= np.isfinite(rewards).all(0)  # fragments with other numbers are not trained on
        start = torch.tensor([f.return_before for f in fragments], dtype=torch.float64)
        # Only a fragment's last row can end its episode, and no row follows it.
        never = torch.zeros(shape, dtype=torch.bool)
        self._scaler.update(torch.from_numpy(rewards), never, start, torch.from_numpy(mask))
        return 1.0 / self._scaler.deviation

    def state(self) -> list[float]:
        """JSON-able."""
        moments = self._scaler.moments
        return [moments.count, float(moments.mean), float(moments.m2)]

    def load_state(self, state: Any) -> None:
        if not isinstance(state, list) or len(state) != 3:
            raise CheckpointError(
                "learner state: return_moments is missing: the checkpoint is of a run without "
                "algorithm.reward_scaling. Set it to false to go on with that run"
            )
        moments = self._scaler.moments
        moments.count = float(state[0])
        moments.mean, moments.m2 = (torch.tensor(x, dtype=torch.float64) for x in state[1:])


def take_observations(policy: Policy, batch: SampleBatch, finite: np.ndarray) -> None:
    """Move the policy's observation statistics by the rows of a batch, context included, if it has such.

    finite: [F] the fragments whose rows count. To be called when the batch has been trained on: until then all
    forward passes must use the statistics that its actions were chosen with.
    """
    if policy.normalizer is None:
        return
    rows = finite[batch.fragment_of_row]
    seen = {name: torch.from_numpy(array[rows]) for name, array in batch.obs.items() if policy.normalizer.takes(name)}
    policy.normalizer.merge(policy.normalizer.moments(seen))
