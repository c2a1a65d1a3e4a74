"""Actions of several parts, squashed actions, and action masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces as S

from tetherl.errors import ConfigError, SpaceError
from tetherl.spaces import ActionCodec

# ---- actions of several parts


NESTED = S.Dict(
    {
        "aim": S.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32)),
        "keys": S.MultiBinary(3),
        "more": S.Tuple([S.Discrete(4, start=-1), S.MultiDiscrete([[2, 3], [4, 5]])]),
        "throttle": S.Box(-0.1, 0.1, (), np.float64),
    }
)


@pytest.mark.parametrize("squash", [False, True])
def test_rows_of_parts_and_environment_actions_are_inverse(squash: bool) -> None:
    codec = ActionCodec(NESTED, squash)
    assert [part.name for part in codec.parts] == ["aim", "keys", "more/0", "more/1", "throttle"]
    assert codec.width == 2 + 3 + 1 + 4 + 1 and codec.dtype == np.float32
    assert codec.inputs_size == 4 + 3 + 4 + 14 + 2 and codec.mask_width == 0
    NESTED.seed(3)
    for _ in range(50):
        action = NESTED.sample()
        row = codec.from_env(action)
        assert row.shape == (codec.width,) and row.dtype == np.float32
        back = codec.to_env(row)
        assert isinstance(back["more"], tuple) and type(back["more"][0]) is int
        assert NESTED.contains({**back, "more": (np.int64(back["more"][0]), back["more"][1])})
        assert back["more"][0] == action["more"][0] and np.array_equal(back["more"][1], action["more"][1])
        assert np.array_equal(back["keys"], action["keys"]) and back["keys"].dtype == np.int8
        np.testing.assert_allclose(back["aim"], action["aim"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(back["throttle"], action["throttle"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(codec.from_env(codec.to_wire(row)), row, rtol=1e-3, atol=1e-3)


def test_the_largest_id_of_a_part_survives_its_float_row() -> None:
    codec = ActionCodec(S.Tuple([S.Discrete(2**24), S.Box(-1, 1, ())]))
    row = codec.from_env((2**24 - 1, 0.5))
    assert codec.to_env(row)[0] == 2**24 - 1


def test_wrong_actions_of_parts_are_refused() -> None:
    space = S.Dict({"a": S.Discrete(2), "b": S.Tuple([S.Box(-1, 1, (2,))])})
    codec = ActionCodec(space)
    for value, words in (
        ([0, [[0.0, 0.0]]], ["action is a list", "mapping", "'a'"]),
        ({"a": 0}, ["'a'", "'b'"]),
        ({"a": 0, "b": [[0.0, 0.0]], "c": 1}, ["'c'"]),
        ({"a": 2, "b": [[0.0, 0.0]]}, ["action 'a'", "0 to 1"]),
        ({"a": 0, "b": {"0": 1}}, ["action 'b' is a dict", "list"]),
        ({"a": 0, "b": [[0.0, 2.0]]}, ["action 'b/0'", "2.0"]),
        ({"a": 0, "b": []}, ["action 'b'", "[0]"]),
    ):
        with pytest.raises(SpaceError) as caught:
            codec.from_env(value)
        for word in words:
            assert word in str(caught.value), str(caught.value)
    with pytest.raises(SpaceError, match=r"\(2,\), expected \(3,\)"):
        codec.to_env(np.zeros(2, np.float32))


def test_squashed_actions_reach_the_bounds_and_never_leave_them() -> None:
    space = S.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))
    codec = ActionCodec(space, squash=True)
    for u in (-1e30, -10.0, -0.5, 0.0, 3.0, 10.0, 1e30):
        action = codec.to_env(np.array([u, u], np.float32))
        assert space.contains(action)
        np.testing.assert_allclose(action, [2 * np.tanh(u), 5 + 5 * np.tanh(u)], rtol=1e-6, atol=1e-6)
    assert np.isfinite(codec.from_env(space.high)).all()  # tanh never gets there
    for space in (S.Box(-np.inf, np.inf, (1,)), S.Box(0, np.inf, (1,)), S.Box(1.0, 1.0, (1,)), S.Discrete(2)):
        with pytest.raises(ConfigError, match="tanh"):
            ActionCodec(space, squash=True)
    mixed = ActionCodec(S.Tuple([S.Discrete(2), S.Box(-1, 1, ())]), squash=True)
    assert [part.squash for part in mixed.parts] == [False, True]


# ---- action masks


def test_masks_are_booleans_one_for_each_choice() -> None:
    discrete, parts, bits = (
        ActionCodec(s) for s in (S.Discrete(3, start=4), S.MultiDiscrete([2, 3]), S.MultiBinary(2))
    )
    assert (discrete.mask_width, parts.mask_width, bits.mask_width) == (3, 5, 2)
    for value in ([True, False, True], np.array([1, 0, 1], np.int8), (1.0, 0.0, 1.0)):
        mask = discrete.mask(value)
        assert mask.dtype == bool and mask.tolist() == [True, False, True]
    for value in ([1, 0, 0, 0, 1], (np.array([1, 0]), np.array([0, 0, 1])), [[1, 0], [0, 0, 1]]):
        assert parts.mask(value).tolist() == [True, False, False, False, True]
    assert bits.mask([0, 0]).tolist() == [False, False]  # both bits stay 0: that is a choice


@pytest.mark.parametrize(
    ("space", "value", "words"),
    [
        (S.Discrete(3), [True, True], ["(2,)", "(3,)", "3 booleans"]),
        (S.Discrete(3), True, ["()", "(3,)"]),
        (S.Discrete(3), [0, 2, 1], ["3 booleans", "2"]),
        (S.Discrete(3), [0.0, math.nan, 1.0], ["3 booleans", "nan"]),
        (S.Discrete(3), ["a", "b", "c"], ["3 booleans"]),
        (S.Discrete(3), [[1, 0], 1], ["array"]),
        (S.Discrete(3), None, ["()"]),
        (S.Discrete(3), [0, 0, 0], ["forbids every choice; at least one"]),
        (S.MultiDiscrete([2, 3]), [1, 0, 0, 0, 0], ["forbids every choice of part 1"]),
        (S.Box(-1, 1, (2,)), [1, 1], ["Box", "none"]),
        (S.Dict({"a": S.Discrete(2)}), [1, 1], ["Dict", "none"]),
    ],
)
def test_masks_that_are_none_are_refused(space: S.Space, value: Any, words: list[str]) -> None:
    with pytest.raises(SpaceError, match="action mask") as caught:
        ActionCodec(space).mask(value)
    for word in words:
        assert word in str(caught.value)
