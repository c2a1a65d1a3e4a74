from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as S

from tetherl.errors import ConfigError, SpaceError
from tetherl.spaces import ActionCodec, ObservationCodec, space_from_spec, space_to_spec

IMAGE = S.Box(0, 255, (6, 8, 1), np.uint8)
FLOAT_IMAGE = S.Box(0, 1, (6, 8, 1), np.float32)
NESTED = S.Dict(
    OrderedDict(
        [
            ("view", S.Dict({"camera": IMAGE, "depth": S.Box(0, 10, (6, 8), np.float32)})),
            ("body", S.Tuple([S.Box(-1, 1, (3,)), S.Discrete(4, start=2), S.MultiBinary(5)])),
            ("ammo", S.MultiDiscrete([3, 7])),
        ]
    )
)
SPACES: dict[str, S.Space] = {
    "image": IMAGE,
    "floats": S.Box(np.array([-1, -np.inf], np.float32), np.array([np.inf, 0.1], np.float32)),
    "scalar": S.Box(-2.0, 3.0, (), np.float64),
    "ints": S.Box(-5, 1000, (2, 3), np.int32),
    "discrete": S.Discrete(3),
    "started": S.Discrete(3, start=-1),
    "multidiscrete": S.MultiDiscrete([2] * 9),
    "matrix": S.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [0, -1]])),
    "bits": S.MultiBinary(4),
    "bit matrix": S.MultiBinary([2, 3]),
    "nested": NESTED,
}


def refused(space: S.Space, value: Any, *words: str) -> str:
    with pytest.raises(SpaceError) as caught:
        ObservationCodec(space).encode(value)
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    return message


# ---- specs


@pytest.mark.parametrize("name", SPACES)
def test_a_spec_survives_json_and_gives_the_same_space(name: str) -> None:
    spec = json.loads(json.dumps(space_to_spec(SPACES[name]), allow_nan=False))
    again = space_from_spec(spec)
    assert again == SPACES[name]
    assert space_to_spec(again) == spec
    if isinstance(again, S.Dict):
        assert list(again.spaces) == list(SPACES[name].spaces)


def test_specs_as_people_write_them() -> None:
    spec = {"type": "Box", "low": 0, "high": 255, "shape": [240, 320, 1], "dtype": "uint8"}
    assert space_from_spec(spec) == S.Box(0, 255, (240, 320, 1), np.uint8)
    assert space_from_spec({"type": "MultiDiscrete", "nvec": [2] * 9}) == S.MultiDiscrete([2] * 9)
    wide = space_from_spec({"type": "Box", "low": [-1, "-inf"], "high": ["inf", math.inf]})
    assert wide == S.Box(np.array([-1, -np.inf], np.float32), np.array([np.inf, np.inf], np.float32))
    assert space_from_spec({"type": "Box", "low": -1, "high": [1, 2]}).shape == (2,)
    assert space_from_spec({"type": "Box", "low": -1, "high": 1, "shape": []}).shape == ()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (5, ["space:", "mapping"]),
        ({"n": 4}, ["space.type", "None"]),
        ({"type": ["Box"]}, ["space.type"]),
        ({"type": "Discreet", "n": 4}, ["space.type", "did you mean 'Discrete'"]),
        ({"type": "Text", "n": 4}, ["space.type", "Box"]),
        ({"type": "Discrete", "m": 4}, ["space.m"]),
        ({"type": "MultiDiscrete", "nvecs": [3]}, ["space.nvecs", "did you mean 'nvec'"]),
        ({"type": "Discrete"}, ["space.n", "needs it"]),
        ({"type": "Discrete", "n": 0}, ["space.n", "at least 1"]),
        ({"type": "Discrete", "n": 2.5}, ["space.n", "integer", "2.5"]),
        ({"type": "Discrete", "n": "4"}, ["space.n", "'4'"]),
        ({"type": "MultiDiscrete", "nvec": 3}, ["nvec", "list"]),
        ({"type": "MultiDiscrete", "nvec": [3, [2]]}, ["nvec"]),
        ({"type": "MultiDiscrete", "nvec": [3, 2], "start": [1]}, ["start"]),
        ({"type": "MultiDiscrete", "nvec": []}, ["nvec"]),
        ({"type": "Box", "low": 0, "high": 1}, ["space.shape", "needed"]),
        ({"type": "Box", "low": 0, "high": 1, "shape": 4}, ["space.shape", "list of sizes", "4"]),
        ({"type": "Box", "low": 0, "high": 1, "shape": [4, 0]}, ["space.shape", "at least 1"]),
        ({"type": "Box", "low": 0, "high": 1, "shape": [4], "dtype": "flaot32"}, ["dtype", "'float32'"]),
        ({"type": "Box", "low": 0, "high": 256, "shape": [4], "dtype": "uint8"}, ["space.high", "256"]),
        ({"type": "Box", "low": 0, "high": "inf", "shape": [4], "dtype": "uint8"}, ["space.high", "inf"]),
        ({"type": "Box", "low": 0.5, "high": 5, "shape": [4], "dtype": "uint8"}, ["space.low", "0.5"]),
        ({"type": "Box", "low": 0, "high": 1e300, "shape": [4]}, ["space.high", "float32"]),
        ({"type": "Box", "low": math.nan, "high": 1, "shape": [4]}, ["space.low", "nan"]),
        ({"type": "Box", "low": "low", "high": 1, "shape": [4]}, ["space.low", "'low'"]),
        ({"type": "Box", "low": None, "high": 1, "shape": [4]}, ["space.low", "None"]),
        ({"type": "Box", "low": [0, 0], "high": 1, "shape": [3]}, ["space.low", "(2,)", "(3,)"]),
        ({"type": "Box", "low": [0, [1]], "high": 1}, ["space.low"]),
        ({"type": "Box", "low": 2, "high": 1, "shape": [3]}, ["low must not be above high"]),
        ({"type": "Dict", "spaces": {}}, ["space.spaces"]),
        ({"type": "Dict", "spaces": {"a": {"type": "Discrete", "n": -1}}}, ["space.spaces.a.n"]),
        ({"type": "Tuple", "spaces": [{"type": "Discrete", "n": 1}, 3]}, ["space.spaces.1", "3"]),
        ({"type": "Tuple", "spaces": {"a": 1}}, ["space.spaces", "list"]),
    ],
)
def test_a_wrong_spec_is_named_by_its_path(spec: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        space_from_spec(spec)
    for word in words:
        assert word in str(caught.value)


def test_spaces_that_are_not_supported() -> None:
    for space in (S.Text(5), S.Sequence(S.Discrete(2)), S.Dict({"a": S.Text(5)})):
        with pytest.raises(ConfigError, match="not supported"):
            space_to_spec(space)
        with pytest.raises(ConfigError, match="not supported"):
            ObservationCodec(space)


# ---- observations


@pytest.mark.parametrize("name", SPACES)
def test_whatever_a_space_samples_fits(name: str) -> None:
    space = SPACES[name]
    space.seed(1)
    codec = ObservationCodec(space)
    rows = [codec.encode(space.sample()) for _ in range(20)]
    for row in rows:
        assert list(row) == [leaf.name for leaf in codec.leaves]
        for leaf in codec.leaves:
            array = row[leaf.name]
            assert type(array) is np.ndarray and array.flags.c_contiguous
            assert array.shape == leaf.shape and array.dtype == leaf.dtype
            if leaf.nvec is not None:
                assert np.all(array >= 0) and np.all(array.reshape(-1) < leaf.nvec)
    assert sum(a.nbytes for a in rows[0].values()) == codec.nbytes
    stacked = codec.stack(rows)
    for leaf in codec.leaves:
        assert stacked[leaf.name].dtype == leaf.dtype
        np.testing.assert_array_equal(stacked[leaf.name], np.stack([row[leaf.name] for row in rows]))


def test_leaves_say_what_they_are() -> None:
    leaves = {leaf.name: leaf for leaf in ObservationCodec(NESTED).leaves}
    assert list(leaves) == ["view/camera", "view/depth", "body/0", "body/1", "body/2", "ammo"]
    kinds = ["image", "box", "box", "discrete", "multibinary", "multidiscrete"]
    assert [leaf.kind for leaf in leaves.values()] == kinds
    assert leaves["body/1"].nvec == (4,) and leaves["ammo"].nvec == (3, 7)
    assert leaves["view/camera"].dtype == np.uint8 and leaves["body/2"].dtype == np.int8
    low = leaves["body/0"].low
    assert low is not None and low.tolist() == [-1, -1, -1]
    matrix = ObservationCodec(SPACES["matrix"]).leaves[0]
    assert matrix.shape == (2, 2) and matrix.nvec == (2, 3, 4, 5)


@pytest.mark.parametrize("shape", [(240, 320), (240, 320, 1), (1, 240, 320)])
def test_images_of_any_declared_layout_are_images(shape: tuple[int, ...]) -> None:
    leaf = ObservationCodec(S.Box(0, 255, shape, np.uint8)).leaves[0]
    assert leaf.kind == "image" and leaf.shape == shape
    assert ObservationCodec(S.Box(0, 1, (240, 320), np.float32)).leaves[0].kind == "box"


def test_ids_are_stored_from_zero() -> None:
    assert ObservationCodec(S.Discrete(4, start=2)).encode(5)[""] == 3
    row = ObservationCodec(SPACES["matrix"]).encode([[1, 3], [3, -1]])[""]
    assert row.tolist() == [[1, 2], [3, 0]]
    refused(S.Discrete(4, start=2), 6, "value 6", "2 to 5")
    refused(S.Discrete(4, start=2), 1, "value 1")


def test_uint8_stays_uint8_and_is_not_copied() -> None:
    image = np.arange(48, dtype=np.uint8).reshape(6, 8, 1)
    encoded = ObservationCodec(IMAGE).encode(image)[""]
    assert encoded.dtype == np.uint8 and encoded is image
    flipped = ObservationCodec(IMAGE).encode(image[:, ::-1])[""]
    assert flipped.flags.c_contiguous
    np.testing.assert_array_equal(flipped, image[:, ::-1])
    image.setflags(write=False)
    assert ObservationCodec(IMAGE).encode(image)[""] is image


def test_safe_casts_are_made() -> None:
    box = S.Box(-1, 1, (3,), np.float32)
    for value in (
        np.array([0.1, -1.0, 1.0]),
        [0.1, -1.0, 1.0],
        (0.1, -1, 1),
        np.array([0.1, -1, 1], ">f4"),
        np.array([0.1, -1, 1], np.float16),
    ):
        encoded = ObservationCodec(box).encode(value)[""]
        assert encoded.dtype == np.dtype("=f4")
        np.testing.assert_allclose(encoded, [0.1, -1, 1], rtol=1e-3)
    assert ObservationCodec(box).encode([0, 1, -1])[""].tolist() == [0, 1, -1]
    assert ObservationCodec(box).encode(np.array([True, False, True]))[""].tolist() == [1, 0, 1]
    assert ObservationCodec(IMAGE).encode(np.full((6, 8, 1), 255, np.int64))[""].dtype == np.uint8
    assert ObservationCodec(S.MultiBinary(2)).encode([True, False])[""].tolist() == [1, 0]
    assert ObservationCodec(S.Discrete(3)).encode(np.int32(2))[""] == 2
    assert ObservationCodec(S.Discrete(3)).encode(np.array(2, np.uint8))[""] == 2


def test_a_rounded_float64_at_the_bound_is_inside() -> None:
    cartpole = gymnasium.make("CartPole-v1").observation_space
    bound = [4.8, 3e38, 0.41887902047863906, -3e38]  # the bounds as the environment computes them, in float64
    assert ObservationCodec(cartpole).encode(bound)[""][2] == cartpole.high[2]
    refused(cartpole, [4.8, 0, 0.4189, 0], "(2,)", "0.4189")


def test_lossy_casts_are_refused() -> None:
    refused(IMAGE, np.zeros((6, 8, 1), np.float32), "float32", "uint8", "observation")
    refused(IMAGE, np.full((6, 8, 1), 256), "256", "(0, 0, 0)", "0 to 255")
    refused(IMAGE, np.full((6, 8, 1), -1), "-1")
    refused(S.Discrete(3), 1.0, "float64")
    refused(S.Box(-np.inf, np.inf, (1,)), np.array([2**24 + 1]), "16777216", "exact")
    assert ObservationCodec(S.Box(-np.inf, np.inf, (1,))).encode(np.array([2**24]))[""] == 2**24
    refused(S.Box(-np.inf, np.inf, (2,)), [0.0, 1e300], "1e+300", "(1,)", "float64")


def test_one_bad_pixel_is_named() -> None:
    image = np.full((6, 8, 1), 0.5)
    image[2, 3, 0] = 1.0001
    for value, dtype in ((image, "float64"), (image.astype(np.float32), "float32")):
        refused(FLOAT_IMAGE, value, "1.0001", "(2, 3, 0)", "0.0 to 1.0", "(6, 8, 1)", dtype, "1 of 48")
    refused(S.Dict({"a": S.Dict({"b": FLOAT_IMAGE})}), {"a": {"b": image}}, "observation 'a/b'", "1.0001")
    image[2, 3, 0] = 1.0
    assert ObservationCodec(FLOAT_IMAGE).encode(image)[""][2, 3, 0] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_only_finite_numbers_even_where_the_bounds_are_infinite(bad: float) -> None:
    for space in (S.Box(-np.inf, np.inf, (3,)), S.Box(-1, 1, (3,)), S.Box(-np.inf, np.inf, (3,), np.float64)):
        for dtype in (np.float32, np.float64):
            refused(space, np.array([0, 0, bad], dtype), str(bad), "(2,)", "not finite")


def test_ids_at_the_bound_are_refused_on_arrival() -> None:
    space = S.MultiDiscrete([425, 3])
    assert ObservationCodec(space).encode([424, 2])[""].tolist() == [424, 2]
    refused(space, [425, 0], "425", "(0,)", "0 to 424")
    refused(space, [0, 3], "3", "(1,)", "0 to 2")
    refused(space, [0, -1], "-1")
    refused(S.MultiBinary(2), [0, 2], "2", "(1,)")


def test_every_step_is_checked() -> None:
    codec, seen = ObservationCodec(S.Box(-55, 55, (2,))), 0
    with pytest.raises(SpaceError, match=r"-55\.5"):
        for step in range(100):
            codec.encode(np.array([0, -55.5 if step == 17 else 1], np.float32))
            seen += 1
    assert seen == 17


def test_shapes_are_explained() -> None:
    refused(IMAGE, np.zeros((6, 8), np.uint8), "(6, 8)", "(6, 8, 1)", "uint8", "reshape")
    refused(IMAGE, np.zeros((6, 8, 3), np.uint8), "(6, 8, 3)", "wrappers")
    refused(S.Discrete(3), [1], "(1,)", "()")
    refused(NESTED["view"], {"camera": 3, "depth": 1}, "observation 'camera'", "()")


@pytest.mark.parametrize(
    "value",
    [None, "abc", b"abc", {"a": 1}, [1, "x"], [[1.0], [2.0, 3.0]], object(), [None, None], 1j, [1j, 2j]],
)
def test_anything_else_is_refused(value: Any) -> None:
    refused(S.Box(-1, 1, (2,)), value, "observation", "(2,)", "float32", "-1.0 to 1.0")


def test_objects_that_fail_to_convert_are_refused() -> None:
    class Broken:
        def __array__(self, *args: Any, **kw: Any) -> np.ndarray:
            raise RuntimeError("no numbers here")

    refused(S.Box(-1, 1, (2,)), Broken(), "no numbers here")


def test_keys_and_parts_are_named() -> None:
    good = NESTED.sample()
    assert ObservationCodec(NESTED).encode(json_like(good))
    refused(NESTED, {k: v for k, v in good.items() if k != "ammo"}, "observation:", "missing", "ammo")
    refused(NESTED, {**good, "armour": 1}, "armour")
    refused(NESTED, {**good, "view": {"camera": good["view"]["camera"]}}, "observation 'view'", "depth")
    refused(NESTED, {**good, "body": good["body"][:2]}, "observation 'body'", "2 parts", "3")
    refused(NESTED, {**good, "body": {"0": 1}}, "observation 'body'", "dict", "list")
    refused(NESTED, [1], "list", "mapping", "ammo")
    refused(NESTED, {**good, "body": (*good["body"][:1], 9, good["body"][2])}, "observation 'body/1'", "9")


def json_like(value: Any) -> Any:
    """As a value looks after a trip through a message."""
    if isinstance(value, dict):
        return {k: json_like(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [json_like(v) for v in value]
    return value.tolist()


def test_two_leaves_with_one_path_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a/b'"):
        ObservationCodec(S.Dict({"a/b": S.Discrete(2), "a": S.Dict({"b": S.Discrete(2)})}))


def test_stacking_copies() -> None:
    codec = ObservationCodec(IMAGE)
    image = np.zeros((6, 8, 1), np.uint8)
    stacked = codec.stack([codec.encode(image)])[""]
    image[:] = 9
    assert stacked.shape == (1, 6, 8, 1) and not stacked.any()


# ---- actions


ACTION_SPACES = {k: SPACES[k] for k in ("discrete", "started", "multidiscrete", "matrix", "bits", "bit matrix")}
ACTION_SPACES |= {
    "box": S.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32)),
    "box matrix": S.Box(-0.1, 0.1, (2, 2), np.float64),
    "box scalar": S.Box(-3, 1, (), np.float32),
    "half-open": SPACES["floats"],
}


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_rows_and_environment_actions_are_inverse(name: str) -> None:
    space = ACTION_SPACES[name]
    space.seed(2)
    codec = ActionCodec(space)
    for _ in range(50):
        action = space.sample()
        row = codec.from_env(action)
        assert row.shape == (codec.width,) and row.dtype == codec.dtype
        back = codec.to_env(row)
        assert space.contains(np.int64(back) if isinstance(back, int) else back)
        np.testing.assert_allclose(back, action, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(codec.from_env(codec.to_wire(row)), row, rtol=1e-5, atol=1e-6)


def test_what_the_environment_gets() -> None:
    action = ActionCodec(S.Discrete(3, start=5)).to_env(np.array([1]))
    assert action == 6 and type(action) is int
    keys = ActionCodec(S.MultiDiscrete([2] * 9))
    assert keys.width == 9 and keys.nvec == (2,) * 9 and keys.dtype == np.int64
    assert keys.to_env(np.ones(9, np.int64)).dtype == np.int64
    bits = ActionCodec(S.MultiBinary(3)).to_env(np.array([0, 1, 1]))
    assert bits.dtype == np.int8 and bits.tolist() == [0, 1, 1]


def test_boxes_are_scaled_and_clipped() -> None:
    codec = ActionCodec(ACTION_SPACES["box"])
    assert codec.dtype == np.float32 and codec.kind == "box"
    for row, expected in (([-1, -1], [-2, 0]), ([0, 0], [0, 5]), ([1, 0.5], [2, 7.5]), ([-7, 7], [-2, 10])):
        action = codec.to_env(np.array(row, np.float32))
        assert action.dtype == np.float32 and action.tolist() == expected
    unscaled = ActionCodec(ACTION_SPACES["half-open"])  # low -1, -inf; high inf, 0.1
    assert unscaled.to_env(np.array([50, -70], np.float32)).tolist() == [50, -70]
    assert unscaled.to_env(np.array([-5, 5], np.float32)).tolist() == [-1, np.float32(0.1)]
    fixed = ActionCodec(S.Box(np.array([2, -1], np.float32), np.array([2, 1], np.float32)))
    assert fixed.to_env(np.array([0.3, 0.3], np.float32))[0] == 2
    assert fixed.from_env([2.0, 0.5]).tolist() == [0, 0.5]


def test_a_clipped_action_is_inside_in_every_dtype() -> None:
    space = S.Box(-0.1, 0.1, (1,), np.float64)
    for row in (-1.0, 1.0, 5.0):
        assert space.contains(ActionCodec(space).to_env(np.array([row], np.float32)))


def test_wrong_actions_are_refused() -> None:
    for space, value, words in (
        (S.Discrete(3), 3, ["action", "3", "0 to 2"]),
        (S.Discrete(3), 1.5, ["action", "float64"]),
        (S.MultiDiscrete([2, 3]), [1, 3], ["(1,)", "0 to 2"]),
        (S.MultiDiscrete([2, 3]), [1], ["(1,)", "(2,)"]),
        (S.MultiBinary(2), [1, 2], ["(1,)"]),
        (S.Box(-1, 1, (2,)), [0.0, 1.5], ["1.5", "(1,)"]),
        (S.Box(-1, 1, (2,)), [0.0, math.nan], ["nan", "not finite"]),
        (S.Box(-1, 1, (2,)), None, ["action", "NoneType"]),
    ):
        with pytest.raises(SpaceError) as caught:
            ActionCodec(space).from_env(value)
        for word in words:
            assert word in str(caught.value)
    with pytest.raises(SpaceError, match=r"\(3,\), expected \(2,\)"):
        ActionCodec(S.MultiDiscrete([2, 3])).to_env(np.zeros(3, np.int64))


def test_action_spaces_that_are_not_supported() -> None:
    for space in (
        S.Text(3),
        S.Box(0, 9, (2,), np.uint8),
        S.Dict({"a": S.Dict({"b": S.Text(3)})}),
        S.Tuple([S.Box(0, 9, (2,), np.uint8)]),
        S.Dict({}),
        S.Tuple([S.Discrete(2**24 + 1)]),
    ):
        with pytest.raises(ConfigError, match="not supported"):
            ActionCodec(space)
