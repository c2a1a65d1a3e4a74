"""Gymnasium spaces <-> arrays: specs for configuration files, observations as flat leaves, actions as rows.

Observations are checked every time, because one bad value that slips through costs a training run: shape,
dtype, finiteness and bounds. An image whose bounds are those of its dtype needs no scan. Floats must be
finite even where a bound is infinite: a network cannot use infinities.
"""

from __future__ import annotations

import difflib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces

from tetherl.errors import ConfigError, SpaceError

Kind = Literal["box", "image", "discrete", "multidiscrete", "multibinary"]

_FIELDS: dict[str, tuple[set[str], set[str]]] = {  # type -> required and optional keys
    "Box": ({"low", "high"}, {"shape", "dtype"}),
    "Discrete": ({"n"}, {"start"}),
    "MultiDiscrete": ({"nvec"}, {"start"}),
    "MultiBinary": ({"n"}, set()),
    "Dict": ({"spaces"}, set()),
    "Tuple": ({"spaces"}, set()),
}
_BOX_DTYPES = (
    *("float32", "float64", "float16", "bool"),
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"),
)


# ---- specs


def space_from_spec(spec: Any, path: str = "space") -> Space:
    """The space that a mapping describes: `{type: Box, low: 0, high: 255, shape: [84, 84, 1], dtype: uint8}`.

    Types and keys: Box (low, high: numbers, nested lists, "inf", "-inf"; shape; dtype, default float32),
    Discrete (n, start), MultiDiscrete (nvec, start), MultiBinary (n), Dict (spaces: name -> spec, in this
    order), Tuple (spaces: list of specs). ConfigError names the path of what is wrong.
    """
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{path}: expected a mapping such as {{type: Discrete, n: 4}}, got {spec!r}")
    kind = spec.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ConfigError(f"{path}.type: {kind!r} is not one of {', '.join(_FIELDS)}{_nearest(kind, _FIELDS)}")
    required, optional = _FIELDS[kind]
    for key in spec:
        if key != "type" and key not in required | optional:
            raise ConfigError(f"{path}.{key}: {kind} has no such key{_nearest(key, required | optional)}")
    for key in sorted(required - set(spec)):
        raise ConfigError(f"{path}.{key}: {kind} needs it")
    if kind == "Box":
        return _box_from_spec(spec, path)
    if kind == "Dict":
        children = spec["spaces"]
        if not isinstance(children, Mapping) or not children or not all(isinstance(k, str) for k in children):
            raise ConfigError(f"{path}.spaces: expected a mapping of names to spaces, got {children!r}")
        # An OrderedDict, because Gymnasium sorts the keys of a plain dict.
        return spaces.Dict(OrderedDict((k, space_from_spec(v, f"{path}.spaces.{k}")) for k, v in children.items()))
    if kind == "Tuple":
        parts = spec["spaces"]
        if not isinstance(parts, list | tuple) or not parts:
            raise ConfigError(f"{path}.spaces: expected a list of spaces, got {parts!r}")
        return spaces.Tuple([space_from_spec(v, f"{path}.spaces.{i}") for i, v in enumerate(parts)])
    if kind == "Discrete":
        n = int(_integers(spec["n"], f"{path}.n", ndim=0, minimum=1))
        return spaces.Discrete(n, start=int(_integers(spec.get("start", 0), f"{path}.start", ndim=0)))
    if kind == "MultiBinary":
        size = _integers(spec["n"], f"{path}.n", minimum=1)
        return spaces.MultiBinary(int(size) if size.ndim == 0 else size.tolist())
    nvec = _integers(spec["nvec"], f"{path}.nvec", minimum=1)
    start = _integers(spec.get("start", np.zeros_like(nvec)), f"{path}.start")
    if nvec.ndim == 0 or nvec.size == 0 or start.shape != nvec.shape:
        raise ConfigError(f"{path}: nvec must be a list such as [3, 2] (and start one like it), got {spec['nvec']!r}")
    return spaces.MultiDiscrete(nvec, start=start)


def _box_from_spec(spec: Mapping[str, Any], path: str) -> spaces.Box:
    name, shape = spec.get("dtype", "float32"), spec.get("shape")
    if name not in _BOX_DTYPES:
        raise ConfigError(f"{path}.dtype: {name!r} is none of {', '.join(_BOX_DTYPES)}{_nearest(name, _BOX_DTYPES)}")
    dtype = np.dtype(name)
    bounds = {key: _bound(spec[key], dtype, f"{path}.{key}") for key in ("low", "high")}
    if shape is None:
        shape = next((b.shape for b in bounds.values() if b.ndim), None)
        if shape is None:
            raise ConfigError(f"{path}.shape: needed when low and high are numbers; [] is a single number")
    elif not isinstance(shape, list | tuple):
        raise ConfigError(f"{path}.shape: expected a list of sizes such as [84, 84, 1], got {shape!r}")
    shape = tuple(_integers(shape, f"{path}.shape", ndim=1, minimum=1).tolist()) if shape else ()
    for key, bound in bounds.items():
        if bound.ndim and bound.shape != shape:
            raise ConfigError(f"{path}.{key}: has shape {bound.shape}, the space has {shape}")
    low, high = (np.broadcast_to(bound, shape).copy() for bound in bounds.values())
    if not np.all(low <= high):
        raise ConfigError(f"{path}: low must not be above high, got {spec['low']!r} and {spec['high']!r}")
    return spaces.Box(low, high, shape=shape, dtype=dtype.type)


def _bound(value: Any, dtype: np.dtype, path: str) -> np.ndarray:
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(np.uint8 if dtype.kind == "b" else dtype)
    try:
        numbers = np.asarray(_map_nested(lambda x: {"inf": math.inf, "-inf": -math.inf}.get(x, x), value))
        fits = (numbers >= limits.min) & (numbers <= limits.max)
        fits |= np.isinf(numbers) if dtype.kind == "f" else False
        if np.all(fits) and (dtype.kind == "f" or np.all(numbers == np.trunc(numbers))):
            return numbers.astype(dtype)
    except (TypeError, ValueError):  # not numbers, or ragged
        pass
    raise ConfigError(f"{path}: expected a number, or nested lists of numbers, that {dtype} can hold, got {value!r}")


def _map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    return [_map_nested(function, v) for v in value] if isinstance(value, list | tuple) else function(value)


def _integers(value: Any, path: str, *, ndim: int | None = None, minimum: int | None = None) -> np.ndarray:
    try:
        numbers = np.asarray(value)
    except ValueError:  # ragged
        numbers = np.asarray(None)
    if numbers.dtype.kind not in "iu" or (ndim is not None and numbers.ndim != ndim):
        what = {0: "an integer", 1: "a list of integers"}.get(-1 if ndim is None else ndim, "integers")
        raise ConfigError(f"{path}: expected {what}, got {value!r}")
    if minimum is not None and np.any(numbers < minimum):
        raise ConfigError(f"{path}: must be at least {minimum}, got {value!r}")
    return numbers.astype(np.int64)


def _nearest(word: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def space_to_spec(space: Space) -> dict[str, Any]:
    """The inverse of `space_from_spec`: JSON-able, infinite bounds as "inf" and "-inf"."""
    if isinstance(space, spaces.Box):
        bounds = {"low": _bound_to_spec(space.low), "high": _bound_to_spec(space.high)}
        return {"type": "Box", **bounds, "shape": list(space.shape), "dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.Discrete):
        spec: dict[str, Any] = {"type": "Discrete", "n": int(space.n)}
        return {**spec, "start": int(space.start)} if space.start else spec
    if isinstance(space, spaces.MultiDiscrete):
        spec = {"type": "MultiDiscrete", "nvec": space.nvec.tolist()}
        return {**spec, "start": space.start.tolist()} if np.any(space.start) else spec
    if isinstance(space, spaces.MultiBinary):
        return {
            "type": "MultiBinary",
            "n": int(space.n) if isinstance(space.n, int | np.integer) else list(space.shape),
        }
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {k: space_to_spec(v) for k, v in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_spec(v) for v in space.spaces]}
    raise ConfigError(f"{space} is not supported: use {', '.join(_FIELDS)}")


def _bound_to_spec(bound: np.ndarray) -> Any:
    uniform = bound.size > 0 and bool(np.all(bound == bound.flat[0]))
    plain = bound.flat[0].item() if uniform else bound.tolist()
    return _map_nested(lambda x: str(x) if isinstance(x, float) and math.isinf(x) else x, plain)


# ---- checking one array


class _Check:
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


# ---- leaves


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


def _leaf(name: str, label: str, space: Space) -> tuple[Leaf, _Check, np.ndarray | None]:
    """Description, check, and the smallest id of each choice (None when all are 0)."""
    if isinstance(space, spaces.Box):
        dtype = np.dtype(space.dtype)
        image = len(space.shape) == 3 or (len(space.shape) == 2 and dtype == np.uint8)
        leaf = Leaf(name, space.shape, dtype, "image" if image else "box", None, space.low, space.high)
        return leaf, _Check(label, space, dtype, space.low, space.high), None
    if isinstance(space, spaces.MultiBinary):
        leaf = Leaf(name, space.shape, np.dtype(np.int8), "multibinary")
        return leaf, _Check(label, space, leaf.dtype, 0, 1), None
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        single = isinstance(space, spaces.Discrete)
        sizes = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec, np.int64)
        start = np.asarray(space.start, np.int64)
        nvec = tuple(int(n) for n in sizes.flat)
        leaf = Leaf(name, sizes.shape, np.dtype(np.int64), "discrete" if single else "multidiscrete", nvec)
        return (
            leaf,
            _Check(label, space, leaf.dtype, start, start + sizes - 1),
            start if start.any() else None,
        )
    raise ConfigError(f"{label}: {space} is not supported: use {', '.join(_FIELDS)}")


class _Node:
    """A part of an observation space: a leaf, or a Dict or Tuple with children."""

    def __init__(self, name: str, space: Space) -> None:
        self.name = name
        self.label = f"observation '{name}'" if name else "observation"
        self.container: Any = None
        parts: list[tuple[Any, Space]]
        self.children: dict[Any, _Node] = {}
        self.leaves: list[Leaf] = []
        if isinstance(space, spaces.Dict):
            self.container, parts = Mapping, list(space.spaces.items())
        elif isinstance(space, spaces.Tuple):
            self.container, parts = (list, tuple), list(enumerate(space.spaces))
        else:
            leaf, self.check, self.start = _leaf(name, self.label, space)
            self.leaves.append(leaf)
            return
        for key, child in parts:
            self.children[key] = node = _Node(f"{name}/{key}" if name else str(key), child)
            self.leaves += node.leaves

    def fill(self, value: Any, out: dict[str, np.ndarray]) -> None:
        if self.container is None:
            array = self.check(value)
            out[self.name] = array if self.start is None else np.asarray(array - self.start)
            return
        if not isinstance(value, self.container):
            wanted = f"a mapping with the keys {list(self.children)}" if self.container is Mapping else "a list"
            raise SpaceError(f"{self.label} is a {type(value).__name__}, expected {wanted}")
        if self.container is Mapping and value.keys() != self.children.keys():
            missing = sorted(map(str, self.children.keys() - value.keys()))
            extra = sorted(map(str, value.keys() - self.children.keys()))
            raise SpaceError(f"{self.label}: missing keys: {missing}; keys not in the space: {extra}")
        if len(value) != len(self.children):
            raise SpaceError(f"{self.label} has {len(value)} parts, expected {len(self.children)}")
        for key, child in self.children.items():
            child.fill(value[key], out)


class ObservationCodec:
    """Turns values of an observation space into flat leaves and checks them on the way.

    leaves: in the space's own order. nbytes: bytes of one encoded observation.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self._root = _Node("", space)
        self.leaves: tuple[Leaf, ...] = tuple(self._root.leaves)
        names = [leaf.name for leaf in self.leaves]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two parts of the observation space have the path '{name}': rename one")
        self.nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)

    def encode(self, value: Any) -> dict[str, np.ndarray]:
        """The value as C-contiguous leaves of the declared shape and dtype. SpaceError if it does not fit.

        Copies only where it must: an array that fits is handed on as it is, so whoever keeps the result while
        the caller reuses its buffer has to copy.
        """
        out: dict[str, np.ndarray] = {}
        self._root.fill(value, out)
        return out

    def stack(self, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Encoded observations -> [N, *leaf] per leaf; always a copy."""
        stacked = {}
        for leaf in self.leaves:
            out = stacked[leaf.name] = np.empty((len(rows), *leaf.shape), leaf.dtype)
            for i, row in enumerate(rows):
                out[i] = row[leaf.name]
        return stacked


class ActionCodec:
    """Turns action rows [A], as the policy samples them, into what the environment takes, and back.

    width: A. dtype: of a row: int64 (ids from 0, bits) or float32 (Box). kind, shape, nvec: as in Leaf. A Box
    is learned in [-1, 1], mapped affinely to its bounds; elements with an infinite bound are not scaled.
    """

    def __init__(self, space: Space) -> None:
        integral = isinstance(space, spaces.Box) and np.dtype(space.dtype).kind != "f"
        if integral or isinstance(space, spaces.Dict | spaces.Tuple):
            raise ConfigError(
                f"action space {space} is not supported: use Discrete, MultiDiscrete, MultiBinary or a Box of floats"
            )
        self.space = space
        leaf, self._check, self._start = _leaf("", "action", space)
        self.kind: Kind = "box" if isinstance(space, spaces.Box) else leaf.kind
        self.shape, self.nvec = leaf.shape, leaf.nvec
        self.width = math.prod(self.shape)
        self.dtype: type[np.int64] | type[np.float32] = np.float32 if self.kind == "box" else np.int64
        self._env_dtype = np.dtype(space.dtype)
        if isinstance(space, spaces.Box):
            self._low, self._high = (b.astype(np.float64).reshape(-1) for b in (space.low, space.high))
            with np.errstate(over="ignore"):
                half = (self._high - self._low) / 2
            scaled = np.isfinite(half)
            self._half = np.where(scaled, half, 1.0)
            self._centre = np.where(scaled, self._low + np.where(scaled, half, 0.0), 0.0)

    def to_env(self, row: np.ndarray) -> Any:
        """[A] -> int (Discrete), integers (MultiDiscrete, MultiBinary), floats within bounds (Box)."""
        if row.shape != (self.width,):
            raise SpaceError(f"action row has shape {row.shape}, expected ({self.width},)")
        if self.kind == "discrete":
            return int(row[0]) + (0 if self._start is None else int(self._start))
        if self.kind == "box":
            row = np.clip(self._centre + self._half * row, self._low, self._high)
        value = row.reshape(self.shape)
        return (value if self._start is None else value + self._start).astype(self._env_dtype)

    to_wire = to_env

    def from_env(self, value: Any) -> np.ndarray:
        """The inverse of `to_env`, for actions that others chose. SpaceError if not in the space."""
        array = self._check(value)
        if self._start is not None:
            array = array - self._start
        row = np.reshape(array, self.width)
        if self.kind == "box":
            row = (row.astype(np.float64) - self._centre) / np.where(self._half > 0, self._half, 1.0)
        return row.astype(self.dtype)
