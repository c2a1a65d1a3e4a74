"""Action masks, actions of several parts and squashed actions in the policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.errors import ConfigError
from tetherl.models.heads import distribution_order
from tetherl.ops.composite import Composite
from tetherl.ops.distributions import SquashedGaussian
from tetherl.spaces import ActionCodec


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("kind", ["discrete", "multidiscrete", "multibinary"])
def test_act_chooses_only_what_the_mask_allows(kit, kind, explore):
    net = kit.lively(kit.policy(actions=kit.ACTIONS[kind]))
    rows = kit.rows(net, 64)
    mask = np.random.default_rng(0).random((64, net.dist.inputs_size)) < 0.4
    nvec = net.actions.nvec or ()
    mask[:, np.cumsum([0, *nvec[:-1]])] |= len(nvec) > 0  # at least one choice of each part
    acted = net.act(*rows, None, explore=explore, generator=generator(), mask=mask)
    dist, actions = torch.from_numpy(acted.dist), torch.from_numpy(acted.actions)
    logp = net.dist.log_prob(dist, actions, torch.from_numpy(mask))
    np.testing.assert_allclose(acted.logp, logp, atol=1e-5)
    if nvec:
        starts = np.cumsum([0, *nvec[:-1]])
        chosen = np.take_along_axis(mask, acted.actions + starts, 1)
    else:
        chosen = mask | (acted.actions == 0)
    assert chosen.all()
    free = net.act(*rows, None, explore=explore, generator=generator())
    assert not np.array_equal(free.actions, acted.actions)
    np.testing.assert_array_equal(free.dist, acted.dist)  # logits are stored as the network gave them


def test_each_part_reads_its_own_outputs_and_deviations(kit):
    space = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3), spaces.Box(-1, 1, (1,))])
    net = kit.policy(actions=space, log_std_init=-0.5)
    assert isinstance(net.dist, Composite)
    assert distribution_order(net.actions).tolist() == [0, 1, 6, 7, 2, 3, 4, 5, 8]
    with torch.no_grad():
        net.policy_head.weight.zero_()
        net.policy_head.bias.copy_(torch.arange(6.0))
        net.log_std.copy_(torch.tensor([-1.0, -2.0, -3.0]))
    dist = net(*kit.rows(net, 2).tensors()).dist
    assert dist.tolist() == [[0, 1, -1, -2, 2, 3, 4, 5, -3]] * 2
    weights = net.weights()
    assert "dist_order" not in weights and weights["log_std"].shape == (3,)


def test_the_order_of_a_dict_is_that_of_its_space(kit):
    net = kit.policy(actions=spaces.Dict({"z": spaces.Discrete(2), "a": spaces.Discrete(5)}))
    names = [part.name for part in net.actions.parts]
    assert names == list(net.actions.space.spaces)
    sizes = {"z": 2, "a": 5}
    assert [part.inputs_size for part in net.dist.parts] == [sizes[name] for name in names]


def test_a_squashed_policy_stores_u_and_acts_inside_the_bounds(kit):
    space = spaces.Box(np.array([-1, 300], np.float32), np.array([1, 500], np.float32))
    net = kit.lively(kit.policy(actions=space, action_distribution="tanh", log_std_init=1.5))
    assert isinstance(net.dist, SquashedGaussian)
    rows = kit.rows(net, 200)
    acted = net.act(*rows, None, explore=True, generator=generator())
    assert np.abs(acted.actions).max() > 2  # u, not tanh(u)
    for row in acted.actions:
        action = net.actions.to_env(row)
        assert space.contains(action)
        np.testing.assert_allclose(action, [np.tanh(row[0]), 400 + 100 * np.tanh(row[1])], rtol=1e-5)
    best = net.act(*rows, None, explore=False, generator=generator())
    np.testing.assert_array_equal(best.actions, best.dist[:, :2])
    assert all(space.contains(net.actions.to_env(row)) for row in best.actions)
    logp = net.dist.log_prob(net(*rows.tensors()).dist, torch.from_numpy(acted.actions))
    np.testing.assert_allclose(logp.detach(), acted.logp, atol=1e-4)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(-1, np.inf, (2,)), "finite bounds"),
        (spaces.Discrete(2), "would do nothing"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(-np.inf, np.inf, (1,))]), "action '1'"),
    ],
)
def test_tanh_needs_bounds_and_a_box(kit, space, words):
    with pytest.raises(ConfigError, match=r"model\.action_distribution") as caught:
        kit.policy(actions=space, action_distribution="tanh")
    assert words in str(caught.value)
    assert ActionCodec(space).width  # fine without
