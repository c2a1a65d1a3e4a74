"""Sizes and refusals of convolution stacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tetherl.errors import ConfigError
from tetherl.models.conv_plan import image_layout, plan_convs

GOLDEN = Path(__file__).parent.parent / "data" / "golden.json"


def _case(name: str) -> dict:
    cases = json.loads(GOLDEN.read_text())["cases"]
    return next(c for c in cases if c["name"] == name)


def test_golden_net_01_founding_conv_shapes():
    case = _case("net_01_founding_conv_shapes")
    filters = case["inputs"]["filters"]
    layers, dense = plan_convs(case["inputs"]["input_hwc"], filters)
    assert [list(layer.out) for layer in layers] == case["expected"]["shapes_chw"]
    assert dense is None
    # With one more layer the sixth is padded too: the shapes of "last is same".
    longer, _ = plan_convs(case["inputs"]["input_hwc"], [*filters, [1, 1, 1]])
    assert [list(layer.out) for layer in longer[:-1]] == case["expected"]["shapes_chw_if_last_is_same"]


def test_same_padding_puts_the_odd_row_at_the_bottom_and_right():
    # 320 wide, kernel 5, stride 3: 107 outputs reach over 106·3+5 = 323 columns, 3 more than there are.
    (first, _), _ = plan_convs((240, 320, 1), [[16, [5, 5], 3], [1, 1, 1]])
    assert first.padding == (1, 2, 1, 1)
    (first, _), _ = plan_convs((5, 4, 1), [[1, [1, 3], [1, 2]], [1, 1, 1]])
    assert first.padding == (0, 1, 0, 0)
    assert first.out == (1, 5, 2)


def test_default_layers_for_small_images():
    layers, dense = plan_convs((84, 84, 4), None)
    assert [layer.out for layer in layers] == [(32, 20, 20), (64, 9, 9), (64, 7, 7)]
    assert dense == 512
    assert all(layer.padding == (0, 0, 0, 0) for layer in layers)


def test_large_image_without_filters_asks_for_a_list():
    with pytest.raises(ConfigError, match=r"conv_filters.*'camera' is 97×60×3.*96 pixels.*\[channels"):
        plan_convs((97, 60, 3), None, name="camera")
    plan_convs((96, 96, 3), None)


def test_too_deep_stack_shows_the_trace_of_sizes():
    with pytest.raises(ConfigError) as error:
        plan_convs((16, 8, 3), None)
    message = str(error.value)
    assert "16×8×3 → 3×1×32 (8×8 stride 4, valid) → ? (4×4 stride 2, valid)" in message
    assert "layer 2 of 3 has a 4×4 kernel, and only 3×1 pixels are left" in message
    with pytest.raises(ConfigError, match=r"20×20×1 → 4×4×8 \(5×5 stride 5, same\) → \? \(6×6 stride 1, valid\)"):
        plan_convs((20, 20, 1), [[8, 5, 5], [16, 6, 1]])


@pytest.mark.parametrize("entry", [[16, [5, 5]], [0, [5, 5], 3], [16, [5], 3], "16", [16, [5, 5.5], 3], [16, True, 1]])
def test_malformed_filters_are_named(entry):
    with pytest.raises(ConfigError, match=r"model\.conv_filters\[1\]: expected \[channels"):
        plan_convs((64, 64, 1), [[8, 3, 1], entry])


def test_empty_list_is_refused():
    with pytest.raises(ConfigError, match="the list is empty"):
        plan_convs((64, 64, 1), [])


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((240, 320), ("hw", 240, 320, 1)),
        ((240, 320, 1), ("hwc", 240, 320, 1)),
        ((84, 84, 4), ("hwc", 84, 84, 4)),
        ((4, 84, 84), ("chw", 84, 84, 4)),
        ((1, 240, 320), ("chw", 240, 320, 1)),
        ((7, 7, 3), ("hwc", 7, 7, 3)),
        ((16, 16, 32), ("hwc", 16, 16, 32)),
        ((10, 320, 3), ("hwc", 10, 320, 3)),
    ],
)
def test_axes_follow_the_declared_shape(shape, layout):
    assert tuple(image_layout(shape)) == layout
