"""Gymnasium spaces <-> the mappings that describe them in configuration files and messages."""

from __future__ import annotations

import difflib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from tetherl.errors import ConfigError

FIELDS: dict[str, tuple[set[str], set[str]]] = {  # type -> required and optional keys
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


def space_from_spec(spec: Any, path: str = "space") -> Space:
    """The space that a mapping describes: `{type: Box, low: 0, high: 255, shape: [84, 84, 1], dtype: uint8}`.

    Types and keys: Box (low, high: numbers, nested lists, "inf", "-inf"; shape; dtype, default float32),
    Discrete (n, start), MultiDiscrete (nvec, start), MultiBinary (n), Dict (spaces: name -> spec, in this
    order), Tuple (spaces: list of specs). ConfigError names the path of what is wrong.
    """
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{path}: expected a mapping such as {{type: Discrete, n: 4}}, got {spec!r}")
    kind = spec.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ConfigError(f"{path}.type: {kind!r} is not one of {', '.join(FIELDS)}{_nearest(kind, FIELDS)}")
    required, optional = FIELDS[kind]
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
    raise ConfigError(f"{space} is not supported: use {', '.join(FIELDS)}")


def _bound_to_spec(bound: np.ndarray) -> Any:
    uniform = bound.size > 0 and bool(np.all(bound == bound.flat[0]))
    plain = bound.flat[0].item() if uniform else bound.tolist()
    return _map_nested(lambda x: str(x) if isinstance(x, float) and math.isinf(x) else x, plain)
