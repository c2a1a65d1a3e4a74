"""What users' own encoders and unusual boxes may contain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.algorithms.config import AlgorithmConfig
from tetherl.algorithms.ppo import PPOLearner
from tetherl.models.config import ModelConfig
from tetherl.models.encoders import input_scale
from tetherl.models.policy import Policy
from tetherl.spaces import ObservationCodec

RESOLVED = {
    "minibatch_size": 8,
    "epochs": 1,
    "lr": 1e-3,
    "max_lag": 1,
    "entropy_coeff": 0.0,
    "use_kl_loss": False,
    "normalize_values": False,
}

ENCODER = """
import torch
from torch import nn

class Encoder(nn.Module):
    out_features = 8
    def __init__(self, observation_space, action_space, config):
        super().__init__()
        self.frozen = nn.Linear(4, 8).requires_grad_(False)
        self.head = nn.Linear(8, 8)
        self.register_buffer("keep", torch.tensor([True] * 7 + [False]))
    def forward(self, leaves):
        return torch.tanh(self.head(self.frozen(leaves[""]) * self.keep))
"""


@pytest.fixture
def policy(tmp_path, monkeypatch):
    (tmp_path / "own_encoder.py").write_text(ENCODER)
    monkeypatch.syspath_prepend(tmp_path)

    def make(seed: int) -> Policy:
        torch.manual_seed(seed)
        return Policy(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), ModelConfig(custom="own_encoder:Encoder"), seed=seed)

    return make


def test_a_frozen_layer_is_saved_and_resumed_and_never_changes(policy, fragments_of):
    learner = PPOLearner(policy(0), AlgorithmConfig(**RESOLVED), max_seq_len=8, seed=0)
    before = {name: value.clone() for name, value in learner.policy.state_dict().items()}
    assert learner.update(fragments_of(learner.policy), version=0, steps_trained=0).trained == 16
    changed = [name for name, value in learner.policy.state_dict().items() if not torch.equal(value, before[name])]
    assert any("head" in name for name in changed) and not any("frozen" in name for name in changed)
    arrays, meta = learner.state()
    other = PPOLearner(policy(1), AlgorithmConfig(**RESOLVED), max_seq_len=8, seed=0)
    other.load_state(arrays, meta)
    assert all(torch.equal(a, b) for a, b in zip(other.policy.parameters(), learner.policy.parameters(), strict=True))


def test_a_mask_buffer_travels_with_the_weights(policy):
    one, two = policy(0), policy(1)
    two.load_weights(one.weights())
    assert all(torch.equal(a, b) for a, b in zip(two.buffers(), one.buffers(), strict=True))


@pytest.fixture
def fragments_of():
    from tetherl.data.assembler import EpisodeAssembler
    from tetherl.data.fragment import Fragment, StepCounts

    def make(policy: Policy) -> list[Fragment]:
        found: list[Fragment] = []
        assembler = EpisodeAssembler(StepCounts(), found.append, episode_id="e", worker=1, fragment_length=16)
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        obs = {"": rng.uniform(-1, 1, 4).astype(np.float32)}
        for _ in range(16):
            acted = policy.act(
                {"": obs[""][None]},
                np.zeros((1, 1), np.int64),
                np.zeros(1, np.float32),
                np.zeros(1, bool),
                None,
                explore=True,
                generator=generator,
            )
            assembler.decided(obs, acted.actions[0], float(acted.logp[0]), acted.dist[0], 0)
            obs = {"": rng.uniform(-1, 1, 4).astype(np.float32)}
            assembler.result(float(rng.normal()), obs)
        return found

    return make


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (spaces.Box(-1, 1, (2, 3, 4), np.float32), "box"),
        (spaces.Box(-np.inf, np.inf, (5, 5, 1), np.float32), "box"),
        (spaces.Box(0, 1, (40, 40, 3), np.float32), "image"),
        (spaces.Box(0, 255, (40, 40, 3), np.float32), "image"),
        (spaces.Box(0, 255, (40, 40), np.uint8), "image"),
    ],
)
def test_a_box_of_three_dimensions_is_an_image_only_if_it_looks_like_one(space, kind):
    (leaf,) = ObservationCodec(space).leaves
    assert leaf.kind == kind
    config = ModelConfig(normalize_observations=True) if kind == "box" else ModelConfig()
    policy = Policy(space, spaces.Discrete(2), config)
    obs = {"": torch.zeros(3, *space.shape, dtype=torch.uint8 if space.dtype == np.uint8 else torch.float32)}
    out = policy(obs, torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert out.dist.shape == (3, 2)


@pytest.mark.parametrize(("high", "scale"), [(255, 1 / 255), (10, 1 / 10), (1, 1.0)])
def test_bytes_are_scaled_by_their_own_bound(high, scale):
    (leaf,) = ObservationCodec(spaces.Box(0, high, (4,), np.uint8)).leaves
    assert input_scale(leaf) == pytest.approx(scale)
