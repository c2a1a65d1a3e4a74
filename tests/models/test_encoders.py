"""Observation encoders: what the first layer sees, axes, padding, leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from tetherl.models.config import ModelConfig
from tetherl.models.defaults import resolve_model
from tetherl.models.encoders import ImageEncoder, ObservationEncoder, input_scale
from tetherl.spaces import ObservationCodec

FILTERS = [[4, [3, 3], 2], [6, [3, 3], 1]]


def build(space: spaces.Space, seed: int = 0, **settings) -> ObservationEncoder:
    leaves = ObservationCodec(space).leaves
    config = resolve_model(ModelConfig(**settings), leaves)
    return ObservationEncoder(leaves, config, torch.Generator().manual_seed(seed))


def first_input(encoder: ObservationEncoder, obs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the first convolution is given (padding included)."""
    conv = next(m for m in encoder.modules() if isinstance(m, nn.Conv2d))
    seen = []
    handle = conv.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    encoder(obs, torch.float32)
    handle.remove()
    return seen[0]


def test_uint8_is_scaled_exactly_once():
    space = spaces.Box(0, 255, (12, 10, 3), np.uint8)
    image = torch.arange(360, dtype=torch.int32).remainder(256).to(torch.uint8).view(1, 12, 10, 3)
    seen = first_input(build(space, conv_filters=[[4, 3, 1]]), {"": image})
    assert seen.shape == (1, 3, 12, 10)
    assert float(seen.min()) == 0.0 and float(seen.max()) == 1.0
    torch.testing.assert_close(seen, image.permute(0, 3, 1, 2).float() / 255)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "scale"),
    [
        (0, 255, np.uint8, 1 / 255),
        (0, 200, np.uint8, 1 / 200),
        (0, 1, np.uint8, 1.0),
        (0, 255, np.float32, 1 / 255),
        (0, 1, np.float32, 1.0),
        (-1, 1, np.float32, 1.0),
        (-np.inf, np.inf, np.float32, 1.0),
    ],
)
def test_scaling_is_decided_by_dtype_and_bounds(low, high, dtype, scale):
    space = spaces.Box(low, high, (8, 8, 1), dtype)
    assert input_scale(ObservationCodec(space).leaves[0]) == scale
    image = torch.ones(1, 8, 8, 1, dtype=torch.from_numpy(np.zeros(1, dtype)).dtype)
    seen = first_input(build(space, conv_filters=[[2, 3, 1]]), {"": image})
    torch.testing.assert_close(seen, torch.full((1, 1, 8, 8), scale))


def test_float_image_up_to_255_gives_the_features_of_the_same_bytes():
    bytes_ = torch.randint(0, 256, (2, 12, 10, 3), dtype=torch.uint8)
    a = build(spaces.Box(0, 255, (12, 10, 3), np.uint8), conv_filters=FILTERS)
    b = build(spaces.Box(0, 255, (12, 10, 3), np.float32), conv_filters=FILTERS)
    c = build(spaces.Box(0, 1, (12, 10, 3), np.float32), conv_filters=FILTERS)
    want = a({"": bytes_}, torch.float32)
    torch.testing.assert_close(b({"": bytes_.float()}, torch.float32), want)
    torch.testing.assert_close(c({"": bytes_.float() / 255}, torch.float32), want)


def test_channels_are_moved_not_reshaped():
    """Permuting the channels of image and first layer alike changes nothing; of the image alone, it does."""
    space = spaces.Box(0, 255, (12, 10, 3), np.uint8)
    encoder = build(space, conv_filters=FILTERS)
    image = torch.randint(0, 256, (2, 12, 10, 3), dtype=torch.uint8)
    before = encoder({"": image}, torch.float32)
    order = [2, 0, 1]
    other = encoder({"": image[..., order]}, torch.float32)
    conv = next(m for m in encoder.modules() if isinstance(m, nn.Conv2d))
    with torch.no_grad():
        conv.weight.copy_(conv.weight[:, order].clone())
    torch.testing.assert_close(encoder({"": image[..., order]}, torch.float32), before)
    assert not torch.allclose(other, before, atol=1e-3)


def test_three_layouts_of_a_grey_image_give_equal_features():
    image = torch.randint(0, 256, (2, 24, 20), dtype=torch.uint8)
    shapes = {"hw": (24, 20), "hwc": (24, 20, 1), "chw": (1, 24, 20)}
    features = [
        build(spaces.Box(0, 255, shape, np.uint8), conv_filters=FILTERS)({"": image.view(2, *shape)}, torch.float32)
        for shape in shapes.values()
    ]
    torch.testing.assert_close(features[1], features[0])
    torch.testing.assert_close(features[2], features[0])


def test_colour_image_with_channels_first():
    image = torch.randint(0, 256, (2, 24, 20, 3), dtype=torch.uint8)
    hwc = build(spaces.Box(0, 255, (24, 20, 3), np.uint8), conv_filters=FILTERS)
    chw = build(spaces.Box(0, 255, (3, 24, 20), np.uint8), conv_filters=FILTERS)
    want = hwc({"": image}, torch.float32)
    torch.testing.assert_close(chw({"": image.permute(0, 3, 1, 2).contiguous()}, torch.float32), want)


def test_padding_really_lies_at_the_bottom_and_right():
    """A kernel that picks the first pixel of its window sees pixels 0 and 2 of 4: none was added on top."""
    space = spaces.Box(0, 1, (4, 4, 1), np.float32)
    leaf = ObservationCodec(space).leaves[0]
    encoder = ImageEncoder(leaf, ModelConfig(conv_filters=[[1, [3, 3], 2], [1, 1, 1]]), torch.Generator())
    convs = [m for m in encoder.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        convs[0].weight.zero_()
        convs[0].weight[0, 0, 0, 0] = 1
        convs[1].weight.fill_(1)
    image = torch.arange(16.0).view(1, 4, 4, 1) / 16
    assert encoder(image, torch.float32).mul(16).tolist() == [[0.0, 2.0, 8.0, 10.0]]


def test_one_encoder_per_leaf_in_the_order_of_the_space():
    space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (12, 10, 3), np.uint8),
            "inner": spaces.Tuple([spaces.Discrete(5, start=2), spaces.MultiBinary(3)]),
            "pose.xy": spaces.Box(-1, 1, (2, 2)),
            "tools": spaces.MultiDiscrete([2, 3]),
        }
    )
    codec = ObservationCodec(space)
    encoder = build(space, conv_filters=FILTERS, fcnet_hiddens=[7])
    obs = {k: torch.from_numpy(v) for k, v in codec.stack([codec.encode(space.sample()) for _ in range(4)]).items()}
    out = encoder(obs, torch.float32)
    camera = 6 * 4 * 3  # 12×10 → 6×5 ('same') → 4×3 ('valid')
    assert encoder.width == camera + 4 * 7
    assert out.shape == (4, encoder.width)
    # Each leaf reaches exactly its own columns.
    starts = {"camera": (0, camera)} | {
        name: (camera + 7 * i, camera + 7 * (i + 1))
        for i, name in enumerate(["inner/0", "inner/1", "pose.xy", "tools"])
    }
    assert list(starts) == [leaf.name for leaf in codec.leaves]
    for name, (start, end) in starts.items():
        changed = dict(obs)
        changed[name] = 1 - obs[name] if name != "camera" else 255 - obs[name]
        differs = (encoder(changed, torch.float32) != out).any(0)
        assert differs[start:end].any(), name
        assert not differs[:start].any() and not differs[end:].any(), name


def test_discrete_observation_is_one_hot():
    encoder = build(spaces.Discrete(4), fcnet_hiddens=[])
    out = encoder({"": torch.tensor([0, 3])}, torch.float32)
    assert out.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    encoder = build(spaces.MultiDiscrete([2, 3]), fcnet_hiddens=[])
    out = encoder({"": torch.tensor([[1, 0], [0, 2]])}, torch.float32)
    assert out.tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]


def test_vectors_of_any_rank_are_flattened():
    encoder = build(spaces.Box(-1, 1, (2, 3)), fcnet_hiddens=[])
    x = torch.arange(12.0).view(2, 2, 3)
    assert torch.equal(encoder({"": x}, torch.float32), x.view(2, 6))
    encoder = build(spaces.Box(-1, 1, ()), fcnet_hiddens=[])
    assert encoder({"": torch.tensor([0.5, -0.5])}, torch.float32).tolist() == [[0.5], [-0.5]]


def test_encoding_leaves_the_observation_alone():
    space = spaces.Box(0, 255, (8,), np.float32)
    x = torch.full((2, 8), 255.0)
    build(space)({"": x}, torch.float32)
    assert torch.equal(x, torch.full((2, 8), 255.0))
