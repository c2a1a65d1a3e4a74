"""The part of a learner's state that playing needs."""

from __future__ import annotations

import numpy as np


def policy_weights(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The policy's weights out of the arrays of `Learner.state`."""
    return {key.removeprefix("policy/"): a for key, a in arrays.items() if key.startswith("policy/")}
