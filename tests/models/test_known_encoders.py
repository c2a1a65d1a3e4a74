"""Image encoders that have a name: Nature CNN and the residual one of IMPALA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from tetherl.models.residual import ResidualBlock, ResidualStack

ATARI = spaces.Box(0, 255, (84, 84, 4), np.uint8)
FOUNDING = spaces.Box(0, 255, (240, 320, 1), np.uint8)


def count(net: nn.Module, part: str = "encoder") -> int:
    return sum(p.numel() for name, p in net.named_parameters() if part in name)


def test_nature_is_the_default_by_name(kit):
    default, named = (kit.policy(ATARI, **model).weights() for model in ({}, {"encoder": "nature"}))
    assert list(default) == list(named) and all(np.array_equal(default[k], named[k]) for k in default)
    net = kit.policy(ATARI, encoder="nature")
    convs = (8 * 8 * 4 + 1) * 32 + (4 * 4 * 32 + 1) * 64 + (3 * 3 * 64 + 1) * 64
    assert count(net) == convs + (7 * 7 * 64 + 1) * 512
    assert net.trunk.width == 512


def test_nature_takes_larger_images_when_it_is_asked_for(kit):
    net = kit.policy(FOUNDING, encoder="nature")
    assert net.trunk.encoder.leaves["0"].dense[0].in_features == 64 * 26 * 36


def test_impala_has_the_published_layers(kit):
    net = kit.policy(ATARI, encoder="impala")
    expected, inputs = 0, 4
    for channels in (16, 32, 32):
        expected += (9 * inputs + 1) * channels + 4 * (9 * channels + 1) * channels
        inputs = channels
    assert count(net) == expected + (11 * 11 * 32 + 1) * 256
    assert sum(isinstance(m, nn.Conv2d) for m in net.modules()) == 15
    assert net.trunk.width == 256


@pytest.mark.parametrize("space", [ATARI, FOUNDING, spaces.Box(0, 1, (7, 5), np.uint8)], ids=["84", "240", "odd"])
@pytest.mark.parametrize("rnn", [None, "gru"])
def test_impala_acts_and_learns_on_any_size(kit, space, rnn):
    net = kit.lively(kit.policy(space, encoder="impala", rnn=rnn))
    rows = kit.rows(net, 3)
    acted = net.act(*rows, None, explore=True, generator=torch.Generator().manual_seed(0))
    out = net(*rows.tensors(), [1] * 3, None)
    np.testing.assert_allclose(acted.dist, out.dist.detach(), atol=1e-4)
    (out.dist.square().sum() + out.values.square().sum()).backward()
    assert all(
        p.grad is not None and p.grad.any() for n, p in net.named_parameters() if "encoder" in n and "weight" in n
    )


def test_a_residual_block_adds_to_what_it_is_given():
    block = ResidualBlock(4, "relu", torch.Generator().manual_seed(0))
    x = torch.randn(2, 4, 5, 6)
    before = x.clone()
    first, second = (m for m in block.modules() if isinstance(m, nn.Conv2d))
    with torch.no_grad():
        changed = block(x)
        torch.testing.assert_close(changed, x + second(torch.relu(first(torch.relu(x)))))
        second.weight.zero_()
        assert torch.equal(block(x), before) and torch.equal(x, before)
    assert not torch.allclose(changed, before)


def test_each_stack_halves_the_image_and_rounds_up():
    stack = ResidualStack(3, 21, 10, "relu", torch.Generator().manual_seed(0))
    assert stack.stacks(torch.zeros(1, 3, 21, 10)).shape == (1, 32, 3, 2)
    assert stack(torch.zeros(1, 3, 21, 10)).shape == (1, 256) and stack.width == 256
