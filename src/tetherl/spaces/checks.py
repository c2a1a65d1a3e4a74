"""Checks of one array: exact shape and dtype, finiteness and bounds, with errors that say what came."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces

from tetherl.errors import ConfigError, SpaceError
from tetherl.spaces.specs import FIELDS

Kind = Literal["box", "image", "discrete", "multidiscrete", "multibinary"]


class Check:
    """Makes an array of one exact shape and dtype out of a value, or says precisely why that cannot be."""

    def __init__(self, label: str, space: Space, dtype: np.dtype, low: Any, high: Any) -> None:
        self.label, self.dtype = label, dtype
        self.shape: tuple[int, ...] = tuple(space.shape or ())
        low, high = np.asarray(low, dtype), np.asarray(high, dtype)
        span = f", range {low.min()!s} to {high.max()!s}" if low.size else ""
        self.expected = f"{type(space).__name__} of shape {self.shape}, dtype {dtype}{span}"
        if dtype.kind == "f":  # an infinite bound still refuses infinities
            low = np.maximum(low, np.finfo(dtype).min)
            high = np.minimum(high, np.finfo(dtype).max)
            self.scan = True
        else:
            least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            self.scan = not (np.all(low == least) and np.all(high == most))
        uniform = low.size > 0 and bool(np.all(low == low.flat[0]) and np.all(high == high.flat[0]))
        self.low, self.high = (low.flat[0], high.flat[0]) if uniform else (low, high)

    def __call__(self, value: Any) -> np.ndarray:
        array = value if type(value) is np.ndarray else self._as_array(value)
        if array.shape != self.shape:
            right = array.size == math.prod(self.shape)
            hint = "The number of elements is right: reshape it" if right else "Check the environment's wrappers"
            raise SpaceError(
                f"{self.label} has shape {array.shape}, expected {self.shape} ({self.expected}; "
                f"dtype {array.dtype} came). {hint}, or correct the declared space."
            )
        result = array if array.dtype == self.dtype else self._cast(array)
        if self.scan:
            inside = result >= self.low
            inside &= result <= self.high
            if not inside.all():
                raise self._outside(array, inside)
        return result if result.flags.c_contiguous else result.copy(order="C")

    def _as_array(self, value: Any) -> np.ndarray:
        try:
            array = np.asarray(value)
        except Exception as error:  # whatever a foreign object's conversion raises
            raise SpaceError(f"{self.label} is not an array: {error}; expected {self.expected}") from None
        if array.dtype.kind not in "fiub":
            raise SpaceError(f"{self.label} is a {type(value).__name__}, not numbers; expected {self.expected}")
        return array

    def _cast(self, array: np.ndarray) -> np.ndarray:
        """Another dtype, if no value is lost: floats to floats, integers that fit, integers to floats."""
        given, wanted = array.dtype.kind, self.dtype.kind
        if wanted == "f" and given in "fiub":
            if given in "iu" and array.size:
                exact = 2 ** (np.finfo(self.dtype).nmant + 1)
                if int(array.max()) > exact or int(array.min()) < -exact:
                    raise SpaceError(
                        f"{self.label} holds integers beyond ±{exact}, not exact in {self.dtype}; "
                        f"expected {self.expected}"
                    )
            with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused as such
                return array.astype(self.dtype)
        if wanted in "iub" and given in "iub":
            inside = (array >= self.low) & (array <= self.high)
            if not np.all(inside):
                raise self._outside(array, inside)
            return array.astype(self.dtype)
        raise SpaceError(
            f"{self.label} has dtype {array.dtype}, which does not become {self.dtype} without changing "
            f"values; expected {self.expected}. Send {self.dtype}, or declare the dtype that is sent."
        )

    def _outside(self, array: np.ndarray, inside: np.ndarray) -> SpaceError:
        index = tuple(int(i) for i in np.argwhere(~np.asarray(inside))[0]) if array.ndim else ()
        low, high = (np.broadcast_to(bound, self.shape)[index] for bound in (self.low, self.high))
        value = array[index]
        reason = f"is outside {low!s} to {high!s}" if np.isfinite(value) else "is not finite"
        where = f" at index {index}" if index else ""
        bad = array.size - int(np.count_nonzero(inside))
        return SpaceError(
            f"{self.label}: value {value!s}{where} {reason} ({bad} of {array.size} values are wrong; shape "
            f"{array.shape}, dtype {array.dtype} came); expected {self.expected}"
        )


@dataclass(frozen=True, eq=False)
class Leaf:
    """One array of an observation.

    name: its path in the space: '' for a plain space, 'camera', 'a/b', '0'. shape, dtype: of the encoded
    array. nvec: sizes of the choices, flattened (Discrete and MultiDiscrete only); ids are stored from 0 (the
    space's start is subtracted) as int64. low, high: [*shape], Box only.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: Kind
    nvec: tuple[int, ...] | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def _is_image(space: spaces.Box, dtype: np.dtype) -> bool:
    """Bytes in two or three dimensions; floats in three with the bounds of a picture or at least its size."""
    if dtype == np.uint8:
        return len(space.shape) in (2, 3)
    if len(space.shape) != 3:
        return False
    bounds = (float(np.min(space.low)), float(np.max(space.high)))
    return bounds in ((0.0, 1.0), (0.0, 255.0)) or sorted(space.shape)[1] >= 8


def describe(name: str, label: str, space: Space) -> tuple[Leaf, Check, np.ndarray | None]:
    """Description, check, and the smallest id of each choice (None when all are 0)."""
    if isinstance(space, spaces.Box):
        dtype = np.dtype(space.dtype)
        image = _is_image(space, dtype)
        leaf = Leaf(name, space.shape, dtype, "image" if image else "box", None, space.low, space.high)
        return leaf, Check(label, space, dtype, space.low, space.high), None
    if isinstance(space, spaces.MultiBinary):
        leaf = Leaf(name, space.shape, np.dtype(np.int8), "multibinary")
        return leaf, Check(label, space, leaf.dtype, 0, 1), None
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        single = isinstance(space, spaces.Discrete)
        sizes = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec, np.int64)
        start = np.asarray(space.start, np.int64)
        nvec = tuple(int(n) for n in sizes.flat)
        leaf = Leaf(name, sizes.shape, np.dtype(np.int64), "discrete" if single else "multidiscrete", nvec)
        return (
            leaf,
            Check(label, space, leaf.dtype, start, start + sizes - 1),
            start if start.any() else None,
        )
    raise ConfigError(f"{label}: {space} is not supported: use {', '.join(FIELDS)}")
