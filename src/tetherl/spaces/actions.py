"""Actions as rows of numbers: what policies sample, what environments take, and the way back.

The row of a Dict or Tuple holds the rows of its parts one after the other, in the space's own order, as float32: ids
and bits are whole numbers there, exact up to 2^24, and no space may have more choices than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces

from tetherl.errors import ConfigError, SpaceError
from tetherl.spaces.checks import Kind, describe

EXACT = 2**24
"""float32 counts up to here without gaps."""
ATANH_LIMIT = 1 - 1e-6


class ActionPart:
    """One plain space: a whole action, or a part of a Dict or Tuple action.

    name: its path, '' for a whole action. width: numbers in its row. columns: where they are in the whole row.
    kind, shape, nvec: as in Leaf. squash (Box): a row holds u, and tanh(u) is what is mapped to the bounds.
    """

    def __init__(self, name: str, space: Space, first: int, squash: bool) -> None:
        label = f"action '{name}'" if name else "action"
        if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind != "f":
            raise ConfigError(
                f"{label}: {space} is not supported: use Discrete, MultiDiscrete, MultiBinary, a Box of floats, "
                "or a Dict or Tuple of these"
            )
        leaf, self._check, self._start = describe(name, label, space)
        self.name, self.label, self.space = name, label, space
        self.kind: Kind = "box" if isinstance(space, spaces.Box) else leaf.kind
        self.shape, self.nvec = leaf.shape, leaf.nvec
        self.width = math.prod(self.shape)
        self.columns = slice(first, first + self.width)
        self.squash = squash and self.kind == "box"
        self._env_dtype = np.dtype(space.dtype)
        if isinstance(space, spaces.Box):
            low, high = (b.astype(np.float64).reshape(-1) for b in (space.low, space.high))
            with np.errstate(over="ignore"):
                half = (high - low) / 2
            scaled = np.isfinite(half)
            if self.squash and not (scaled & (half > 0)).all():
                raise ConfigError(
                    f"model.action_distribution: tanh needs finite bounds with low below high for every number of "
                    f"{label}, got {space}. Use gaussian, or give it bounds."
                )
            self.low, self.high = low, high
            self._half = np.where(scaled, half, 1.0)
            self._centre = np.where(scaled, low + np.where(scaled, half, 0.0), 0.0)
            self.scaled = scaled

    @property
    def inputs_size(self) -> int:
        """Numbers that describe the part's distribution: logits, or means and log standard deviations."""
        return sum(self.nvec) if self.nvec is not None else self.width * (2 if self.kind == "box" else 1)

    def to_env(self, row: np.ndarray) -> Any:
        if self.kind == "discrete":
            return int(row[0]) + (0 if self._start is None else int(self._start))
        if self.kind == "box":
            learned = np.tanh(row.astype(np.float64)) if self.squash else row
            row = np.clip(self._centre + self._half * learned, self.low, self.high)
        value = row.reshape(self.shape)
        return (value if self._start is None else value + self._start).astype(self._env_dtype)

    def from_env(self, value: Any) -> np.ndarray:
        array = self._check(value)
        if self._start is not None:
            array = array - self._start
        row = np.reshape(array, self.width)
        if self.kind == "box":
            row = (row.astype(np.float64) - self._centre) / np.where(self._half > 0, self._half, 1.0)
            if self.squash:  # at the bounds u would be infinite; such rows are context, never trained on
                row = np.arctanh(np.clip(row, -ATANH_LIMIT, ATANH_LIMIT))
        return row


class _Group:
    """A Dict or a Tuple."""

    def __init__(self, name: str, space: spaces.Dict | spaces.Tuple, first: int, squash: bool) -> None:
        self.label = f"action '{name}'" if name else "action"
        self.named = isinstance(space, spaces.Dict)
        children = list(space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces))
        if not children:
            raise ConfigError(f"{self.label}: {space} is not supported: it has no parts")
        self.children: dict[Any, ActionPart | _Group] = {}
        self.parts: list[ActionPart] = []
        for key, child in children:
            path = f"{name}/{key}" if name else str(key)
            node = self.children[key] = _node(path, child, first, squash)
            self.parts += [node] if isinstance(node, ActionPart) else node.parts
            first = self.parts[-1].columns.stop

    def to_env(self, row: np.ndarray) -> Any:
        values = {
            key: child.to_env(_of_part(child, row) if isinstance(child, ActionPart) else row)
            for key, child in self.children.items()
        }
        return values if self.named else tuple(values.values())

    def fill(self, value: Any, row: np.ndarray) -> None:
        if not isinstance(value, Mapping if self.named else list | tuple):
            wanted = f"a mapping with the keys {list(self.children)}" if self.named else "a list"
            raise SpaceError(f"{self.label} is a {type(value).__name__}, expected {wanted}")
        keys = list(value) if isinstance(value, Mapping) else list(range(len(value)))
        if set(keys) != set(self.children):
            raise SpaceError(f"{self.label} has the parts {keys}, expected {list(self.children)}")
        for key, child in self.children.items():
            if isinstance(child, ActionPart):
                row[child.columns] = child.from_env(value[key])
            else:
                child.fill(value[key], row)


def _node(name: str, space: Space, first: int, squash: bool) -> ActionPart | _Group:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _Group(name, space, first, squash)
    return ActionPart(name, space, first, squash)


def _of_part(part: ActionPart, row: np.ndarray) -> np.ndarray:
    """A part's numbers out of a whole row of float32."""
    own = row[part.columns]
    return own if part.kind == "box" else own.astype(np.int64)


class ActionCodec:
    """Turns action rows [A], as the policy samples them, into what the environment takes, and back.

    width: A. dtype: of a row: int64 (ids from 0, bits) or float32 (Box; Dict and Tuple, see above). parts: the plain
    spaces of a Dict or Tuple in order, else the space itself; kind, shape and nvec are those of a plain space ("parts",
    () and None for others). A Box is learned in [-1, 1], mapped affinely to its bounds; elements with an infinite
    bound are not scaled. With `squash` rows of a Box hold u, and tanh(u) in (-1, 1) is what is mapped.
    mask_width: length of an action mask, 0 for spaces without one.
    """

    def __init__(self, space: Space, squash: bool = False) -> None:
        self.space = space
        self._root = _node("", space, 0, squash)
        plain = self._root if isinstance(self._root, ActionPart) else None
        self.parts: tuple[ActionPart, ...] = (plain,) if plain is not None else tuple(_group(self._root).parts)
        self.kind: Kind | Literal["parts"] = plain.kind if plain is not None else "parts"
        self.shape = plain.shape if plain is not None else ()
        self.nvec = plain.nvec if plain is not None else None
        self.width = sum(part.width for part in self.parts)
        whole = plain is not None and plain.kind != "box"
        self.dtype: type[np.int64] | type[np.float32] = np.int64 if whole else np.float32
        self.mask_width = self.parts[0].inputs_size if whole else 0
        if squash and not any(part.kind == "box" for part in self.parts):
            raise ConfigError(f"model.action_distribution: tanh would do nothing: there is no Box in {space}")
        if not whole and any(max(part.nvec or [0]) > EXACT for part in self.parts):
            raise ConfigError(f"action space {space} is not supported: a part has more than {EXACT} choices")

    @property
    def inputs_size(self) -> int:
        """P, numbers that describe the distribution of an action."""
        return sum(part.inputs_size for part in self.parts)

    def to_env(self, row: np.ndarray) -> Any:
        """[A] -> int (Discrete), integers (MultiDiscrete, MultiBinary), floats within bounds (Box), or a dict or
        tuple of these."""
        if row.shape != (self.width,):
            raise SpaceError(f"action row has shape {row.shape}, expected ({self.width},)")
        return self._root.to_env(row)

    to_wire = to_env

    def from_env(self, value: Any) -> np.ndarray:
        """The inverse of `to_env`, for actions that others chose. SpaceError if not in the space."""
        if isinstance(self._root, ActionPart):
            return self._root.from_env(value).astype(self.dtype)
        row = np.empty(self.width, self.dtype)
        self._root.fill(value, row)
        return row

    def mask(self, value: Any) -> np.ndarray:
        """An action mask as [mask_width] bool; SpaceError if it is none, or forbids every choice.

        value: booleans, or numbers 0 and 1, one per choice: n for Discrete, those of all parts one after the other
        for MultiDiscrete (or a list of one mask per part), and one per bit for MultiBinary (False: the bit stays 0).
        """
        if not self.mask_width:
            raise SpaceError(
                f"action mask: {type(self.space).__name__} actions have none; only Discrete, MultiDiscrete and "
                "MultiBinary do"
            )
        try:
            nested = isinstance(value, list | tuple) and len(value) > 0 and all(np.ndim(part) == 1 for part in value)
            given = np.concatenate([np.asarray(part) for part in value]) if nested else np.asarray(value)
        except (TypeError, ValueError) as error:
            raise SpaceError(f"action mask is not an array: {error}") from None
        expected = f"{self.mask_width} booleans, one per choice"
        if given.shape != (self.mask_width,):
            raise SpaceError(f"action mask has shape {given.shape}, expected ({self.mask_width},): {expected}")
        if given.dtype.kind not in "biuf" or (given.dtype.kind != "b" and not np.isin(given, (0, 1)).all()):
            raise SpaceError(f"action mask: expected {expected} (or 0 and 1), got {given.dtype} {given.tolist()!r:.80}")
        mask = given.astype(bool)
        if self.nvec is not None:
            sizes = np.array(self.nvec, np.int64)
            allowed = np.logical_or.reduceat(mask, np.cumsum(sizes) - sizes)
            if not allowed.all():
                part = f" of part {int(np.argmin(allowed))}" if len(self.nvec) > 1 else ""
                raise SpaceError(f"action mask forbids every choice{part}; at least one must be allowed")
        return mask


def _group(node: ActionPart | _Group) -> _Group:
    assert isinstance(node, _Group)
    return node
