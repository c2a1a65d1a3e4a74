from __future__ import annotations

import numpy as np
import pytest
import torch

from tetherl.algorithms import preparation
from tetherl.algorithms.ppo import PPOLearner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
LSTM = {"use_lstm": True, "lstm_cell_size": 16}


@pytest.mark.parametrize("model", [{}, LSTM])
@pytest.mark.parametrize("device_bytes", [0, 2**30])
def test_one_update_is_the_same_on_both_devices(kit, monkeypatch, model, device_bytes):
    monkeypatch.setattr(preparation, "DEVICE_BYTES", device_bytes)
    config = kit.config(use_kl_loss=True, normalize_values=True, entropy_coeff=0.01, epochs=1)
    metrics, weights = [], []
    fragments = kit.fragments(kit.policy(**model))
    for device in ("cpu", "cuda"):
        policy = kit.policy(**model)
        learner = PPOLearner(policy, config, max_seq_len=8, seed=0, device=device)
        metrics.append(learner.update(fragments, version=0, steps_trained=0).metrics)
        learner.load_state(*learner.state())
        weights.append(policy.weights())
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-2, abs=1e-3)
    for name, array in weights[0].items():
        assert np.allclose(array, weights[1][name], atol=2e-3), name
