"""Observations as flat leaves, checked on the way.

Observations are checked every time, because one bad value that slips through costs a training run: shape,
dtype, finiteness and bounds. An image whose bounds are those of its dtype needs no scan. Floats must be
finite even where a bound is infinite: a network cannot use infinities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from tetherl.errors import ConfigError, SpaceError
from tetherl.spaces.checks import Leaf, describe


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
            leaf, self.check, self.start = describe(name, self.label, space)
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
