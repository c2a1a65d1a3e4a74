"""Sizes of a convolution stack, worked out (or refused) before any layer is built. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tetherl.errors import ConfigError

LARGEST_DEFAULT = 96
"""Images up to this many pixels a side have default layers."""

NATURE_FILTERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""The layers of Mnih et al. 2015 (channels, kernel, stride), all unpadded."""

NATURE_UNITS = 512
"""Width of the dense layer that follows them."""


class ImageLayout(NamedTuple):
    """How an image leaf lies in memory: `axes` is "hw", "hwc" or "chw"."""

    axes: str
    height: int
    width: int
    channels: int


class ConvLayer(NamedTuple):
    """One layer: `padding` is (left, right, top, bottom), `out` is (channels, height, width)."""

    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    out: tuple[int, int, int]


def image_layout(shape: Sequence[int]) -> ImageLayout:
    """Read the axes of an image from its declared shape.

    Rank 2 is (H, W). Rank 3 is (H, W, C), or (C, H, W) if the first axis is short and the last one is not.
    """
    if len(shape) == 2:
        return ImageLayout("hw", shape[0], shape[1], 1)
    first, second, last = shape
    if first <= 16 < last and first < second:
        return ImageLayout("chw", second, last, first)
    return ImageLayout("hwc", first, second, last)


def plan_convs(
    shape: Sequence[int], filters: Sequence[Any] | None, *, name: str = "", any_size: bool = False
) -> tuple[tuple[ConvLayer, ...], int | None]:
    """Layers for an image of this shape, and the width of the dense layer after them (None: no such layer).

    `filters` is a list of [channels, kernel or [kernel_h, kernel_w], stride or [stride_h, stride_w]]. All
    layers but the last are padded to ceil(size / stride), with the odd row or column at the bottom or right;
    the last is unpadded. None gives the default for small images, with `any_size` for all. Raises ConfigError for
    larger images without a list, for entries of another form, and for a stack in which a kernel no longer fits (with
    the trace of sizes).
    """
    layout = image_layout(shape)
    if filters is None:
        if max(layout.height, layout.width) > LARGEST_DEFAULT and not any_size:
            raise ConfigError(
                f"model.conv_filters: {_image(name)} is {_hwc(layout)}, and images of more than"
                f" {LARGEST_DEFAULT} pixels a side have no default layers. Give a list of [channels,"
                " [kernel_h, kernel_w], stride], for example [[16, [8, 8], 4], [32, [4, 4], 2],"
                " [256, [5, 5], 2]]; all are padded 'same' but the last. Or name known ones:"
                " model.encoder nature or impala."
            )
        parsed = [(c, (k, k), (s, s)) for c, k, s in NATURE_FILTERS]
        padded = [False] * len(parsed)
        dense: int | None = NATURE_UNITS
    else:
        parsed = [_parse(entry, i) for i, entry in enumerate(filters)]
        if not parsed:
            raise ConfigError(
                "model.conv_filters: the list is empty. Leave it out for the default, or give at least one."
            )
        padded = [True] * (len(parsed) - 1) + [False]
        dense = None

    layers: list[ConvLayer] = []
    size = (layout.height, layout.width)
    trace = _hwc(layout)
    for i, ((channels, kernel, stride), pad) in enumerate(zip(parsed, padded, strict=True)):
        step = f"{kernel[0]}×{kernel[1]} stride {_pair(stride)}, {'same' if pad else 'valid'}"
        if not pad and (kernel[0] > size[0] or kernel[1] > size[1]):
            default = "the default layers do" if filters is None else "model.conv_filters does"
            raise ConfigError(
                f"model.conv_filters: {default} not fit {_image(name)}: layer {i + 1} of {len(parsed)} has a"
                f" {kernel[0]}×{kernel[1]} kernel, and only {size[0]}×{size[1]} pixels are left for it."
                f" Sizes: {trace} → ? ({step}). Use smaller kernels or strides, or fewer layers."
            )
        padding, size = _fit(size, kernel, stride) if pad else _cut(size, kernel, stride)
        layers.append(ConvLayer(channels, kernel, stride, padding, (channels, *size)))
        trace += f" → {size[0]}×{size[1]}×{channels} ({step})"
    return tuple(layers), dense


def _fit(
    size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int]
) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    out, sides = [], []
    for n, k, s in zip(size, kernel, stride, strict=True):
        m = -(-n // s)
        total = max((m - 1) * s + k - n, 0)
        out.append(m)
        sides.append((total // 2, total - total // 2))
    (top, bottom), (left, right) = sides
    return (left, right, top, bottom), (out[0], out[1])


def _cut(
    size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int]
) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    h, w = ((n - k) // s + 1 for n, k, s in zip(size, kernel, stride, strict=True))
    return (0, 0, 0, 0), (h, w)


def _parse(entry: Any, index: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    ok = isinstance(entry, list | tuple) and len(entry) == 3 and _positive(entry[0])
    pairs = [_as_pair(v) for v in entry[1:]] if ok else []
    if not ok or None in pairs:
        raise ConfigError(
            f"model.conv_filters[{index}]: expected [channels, [kernel_h, kernel_w], stride] with positive"
            f" integers, for example [32, [4, 4], 2]; got {entry!r}"
        )
    kernel, stride = pairs
    assert kernel is not None and stride is not None
    return int(entry[0]), kernel, stride


def _as_pair(value: Any) -> tuple[int, int] | None:
    if _positive(value):
        return int(value), int(value)
    if isinstance(value, list | tuple) and len(value) == 2 and all(_positive(v) for v in value):
        return int(value[0]), int(value[1])
    return None


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _pair(stride: tuple[int, int]) -> str:
    return str(stride[0]) if stride[0] == stride[1] else f"{stride[0]}×{stride[1]}"


def _hwc(layout: ImageLayout) -> str:
    return f"{layout.height}×{layout.width}×{layout.channels}"


def _image(name: str) -> str:
    return f"the image {name!r}" if name else "the observation"
