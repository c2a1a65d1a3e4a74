"""Running statistics of observations as part of the policy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.models.normalize import ObservationNormalizer, normalized_leaves
from tetherl.spaces import ObservationCodec

GOLDEN = Path(__file__).parent.parent / "data" / "golden.json"
MIXED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (8, 8, 1), np.uint8),
        "door": spaces.Discrete(3),
        "keys": spaces.MultiBinary(2),
        "speed": spaces.Box(-np.inf, np.inf, (3,)),
        "level": spaces.Box(0, 255, (2,), np.uint8),
    }
)


def normalizer(space: spaces.Space) -> ObservationNormalizer:
    return ObservationNormalizer(ObservationCodec(space).leaves)


def test_golden_stats_01_parallel_moments():
    case = next(c for c in json.loads(GOLDEN.read_text())["cases"] if c["name"] == "stats_01_parallel_moments")
    expected = case["expected"]
    net = normalizer(spaces.Box(-np.inf, np.inf, (1,), np.float64))
    for batch in case["inputs"]["batches"]:
        net.merge(net.moments({"": torch.tensor(batch, dtype=torch.float64).unsqueeze(1)}))
    assert float(net.count) == expected["count"]
    assert float(net.mean_0) == pytest.approx(expected["mean"], abs=1e-12)
    assert float(net.variance_0) == pytest.approx(expected["var_population"], abs=1e-12)


def test_vectors_are_normalised_and_nothing_else():
    assert [leaf.name for leaf in normalized_leaves(ObservationCodec(MIXED).leaves)] == ["level", "speed"]
    net = normalizer(MIXED)
    obs = {name: torch.ones((4, *box.shape), dtype=torch.uint8) for name, box in MIXED.spaces.items()}
    obs["speed"] = torch.randn(4, 3) * 5 + 100
    obs["level"] = torch.tensor([[0, 50], [10, 50], [20, 50], [30, 50]], dtype=torch.uint8)
    net.merge(net.moments(obs))
    out = net(obs, torch.float32)
    assert all(out[name] is obs[name] for name in ("camera", "door", "keys"))
    for name in ("speed", "level"):
        x = obs[name].double()
        expected = (x - x.mean(0)) / x.var(0, unbiased=False).clamp(min=1e-8).sqrt()
        torch.testing.assert_close(out[name], expected.float())
    assert torch.equal(out["level"][:, 1], torch.zeros(4)), "a constant element becomes 0, not NaN"


def test_identity_until_the_first_rows_and_clipped_always():
    net = normalizer(spaces.Box(-np.inf, np.inf, (2,)))
    obs = {"": torch.tensor([[3.0, -40.0]])}
    assert net(obs, torch.float32)[""].tolist() == [[3.0, -10.0]]
    net.merge(net.moments({"": torch.empty(0, 2)}))
    assert net(obs, torch.float32)[""].tolist() == [[3.0, -10.0]]
    net.merge(net.moments({"": torch.tensor([[0.0, 0.0], [2.0, 4.0]])}))
    assert net(obs, torch.float32)[""].tolist() == [[2.0, -10.0]], "the first rows replace 0 and 1"


def test_the_order_of_merging_does_not_matter():
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) * 7 + 50
    nets = [normalizer(spaces.Box(-np.inf, np.inf, (2,))) for _ in range(3)]
    nets[0].merge(nets[0].moments({"": x}))
    for net, parts in ((nets[1], x.split([1, 20, 39])), (nets[2], x.flip(0).split([30, 30]))):
        for part in parts:
            net.merge(net.moments({"": part}))
    for net in nets[1:]:
        torch.testing.assert_close(net.mean_0, nets[0].mean_0, rtol=1e-12, atol=0)
        torch.testing.assert_close(net.variance_0, nets[0].variance_0, rtol=1e-10, atol=0)


@pytest.mark.parametrize("model", [{}, {"rnn": "lstm"}, {"rnn": "gru", "vf_share_layers": False}])
def test_statistics_are_in_the_weights_and_move_only_by_merging(kit, model):
    space = spaces.Box(-np.inf, np.inf, (5,))
    net = kit.lively(kit.policy(space, normalize_observations=True, **model))
    rows = kit.rows(net, 6)
    lengths = [6]
    with torch.no_grad():
        before = net(*rows.tensors(), lengths, None)
    seen = rows.tensors()[0]
    net.normalizer.merge(net.normalizer.moments(seen))
    weights = net.weights()
    assert weights["normalizer.mean_0"].dtype == np.float64
    with torch.no_grad():
        after = net(*rows.tensors(), lengths, None)
    assert not torch.allclose(before.dist, after.dist) and not torch.allclose(before.values, after.values)
    other = kit.policy(space, normalize_observations=True, seed=5, **model)
    other.load_weights(weights)
    acted = other.act(*rows.at(slice(0, 1)), None, explore=False, generator=torch.Generator())
    np.testing.assert_allclose(acted.dist, after.dist[:1], atol=1e-5)
    assert all(np.array_equal(weights[k], v) for k, v in other.weights().items()), "acting changes nothing"


def test_a_scale_that_bounds_tell_is_not_applied_after_normalising(kit):
    net = kit.policy(spaces.Box(0, 255, (2,)), normalize_observations=True, fcnet_hiddens=[4])
    seen: list[torch.Tensor] = []
    net.trunk.encoder.leaves["0"].dense.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rows = kit.rows(net, 8)
    net.normalizer.merge(net.normalizer.moments(rows.tensors()[0]))
    net(*rows.tensors(), None, None)
    torch.testing.assert_close(seen[0].std(0, unbiased=False), torch.ones(2))
