from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tetherl.algorithms import preparation
from tetherl.algorithms.parallel import ThreadRendezvous
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


@pytest.mark.parametrize("model", [{}, LSTM])
def test_two_learners_make_the_update_of_one_there_too(kit, model):
    config = kit.config(use_kl_loss=True, normalize_values=True, entropy_coeff=0.01, epochs=1)
    fragments = kit.fragments(kit.policy(**model))

    def one(rank, reduction):
        policy = kit.policy(seed=rank, **model)
        learner = PPOLearner(policy, config, max_seq_len=8, seed=rank, device="cuda", reduction=reduction)
        metrics = learner.update(fragments, version=0, steps_trained=0).metrics
        return metrics, learner.policy.weights()

    meeting = ThreadRendezvous(2)
    with ThreadPoolExecutor(2) as pool:
        (metrics, weights), (_, others) = pool.map(lambda rank: one(rank, meeting.join(rank)), range(2))
    alone, own = one(0, None)
    assert metrics == pytest.approx(alone, rel=1e-2, abs=1e-3)
    for name, array in own.items():
        assert np.allclose(array, weights[name], atol=2e-3), name
        assert np.array_equal(weights[name], others[name]), name
