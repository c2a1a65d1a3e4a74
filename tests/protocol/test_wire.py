"""Arrays and messages as bytes."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tetherl.protocol import messages
from tetherl.protocol.messages import Act, Action
from tetherl.protocol.wire import (
    ALLOWED_DTYPES,
    WireError,
    decode_client,
    decode_server,
    decode_value,
    encode,
    encode_value,
)

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "protocol_vectors.json").read_text())


def through_the_wire(value, as_json):
    data = encode(Act(id=1, episode="e", step=0, observation=value), as_json)
    assert isinstance(data, str) is as_json
    return decode_value(decode_client(data).observation)


def equal(a, b) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("dtype", list(ALLOWED_DTYPES))
def test_every_dtype_and_kind_of_shape(dtype, as_json):
    rng = np.random.default_rng(0)
    for shape in [(), (0,), (3,), (2, 0, 5), (4, 3, 2)]:
        array = rng.integers(0, 2, shape).astype(dtype)
        result = through_the_wire(array, as_json)
        assert result.dtype == np.dtype(dtype)
        assert result.shape == shape
        np.testing.assert_array_equal(result, array)
        assert not result.flags.writeable


@pytest.mark.parametrize("as_json", [False, True])
def test_layout_in_memory_does_not_matter(as_json):
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    for view in (array.T, array[:, ::2], array.astype(">i4"), np.asfortranarray(array)):
        np.testing.assert_array_equal(through_the_wire(view, as_json), view)
        assert through_the_wire(view, as_json).dtype == np.int32


@pytest.mark.parametrize("as_json", [False, True])
def test_nested_values(as_json):
    value = {"camera": np.zeros((2, 2), np.uint8), "a": [1, 2.5, None, "x", True, {"b": np.float32(0.5)}], "t": (1,)}
    expected = {"camera": np.zeros((2, 2), np.uint8), "a": [1, 2.5, None, "x", True, {"b": 0.5}], "t": [1]}
    assert equal(through_the_wire(value, as_json), expected)
    assert equal(decode_value(msgspec.msgpack.decode(msgspec.msgpack.encode(encode_value(value)))), expected)


def test_nan_survives_in_arrays():
    array = np.array([np.nan, np.inf, -0.0], np.float32)
    assert through_the_wire(array, True).tobytes() == array.tobytes()


def array_map(**changes):
    return {"dtype": "float32", "shape": [2], "data": bytes(8), **changes}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (array_map(dtype="object"), "dtype 'object' is not allowed"),
        (array_map(dtype="O"), "not allowed"),
        (array_map(dtype="<f4"), "not allowed"),
        (array_map(dtype="complex64"), "not allowed"),
        (array_map(dtype=["float32"]), "not allowed"),
        (array_map(shape=2), "not a list"),
        (array_map(shape=[1] * 17), "at most 16"),
        (array_map(shape=[-2]), "-2 where a size"),
        (array_map(shape=[2.0]), "where a size"),
        (array_map(shape=[True, 2]), "where a size"),
        (array_map(shape=[2**31]), "where a size"),
        (array_map(shape=[2**30, 2**30]), "too large"),
        (array_map(shape=[0, 2**30, 2**30, 2**30]), "too large"),
        (array_map(shape=[3]), r"shape \[3\] has 12 bytes, but the data has 8"),
        (array_map(shape=[1 << 20, 1 << 18]), "but the data has 8"),
        (array_map(data=[0] * 8), "data is a list"),
        (array_map(data="AAAAAAAAAAA="[:-1] + "!"), "base64|bytes"),
        (array_map(data="AAAA"), "8 bytes, but the data has 3"),
        (array_map(data="AAAAAAAAA!A="), "not base64"),
        ({"dtype": "bool", "shape": [1], "data": b"\x02"}, "other than 0 and 1"),
        (b"raw", "raw bytes cannot"),
        ({1: 2}, "keys must be text"),
        (msgspec.msgpack.Ext(5, b"x"), "a Ext cannot"),
        ([msgspec.msgpack.decode(b"\xd6\xff\x00\x00\x00\x00")], "a datetime cannot"),
    ],
)
def test_what_is_not_an_array_or_value(value, message):
    with pytest.raises(WireError, match=message):
        decode_value(value)


def test_depth_is_limited():
    value = 1
    for _ in range(33):
        value = {"a": value}
    with pytest.raises(WireError, match="nested too deeply"):
        decode_value(value)
    assert decode_value({"a": {"b": 1}}, max_depth=2) == {"a": {"b": 1}}
    with pytest.raises(WireError, match="nested too deeply"):
        decode_value({"a": {"b": 1}}, max_depth=1)
    opening = '{"type":"act","id":1,"episode":"e","step":0,"observation":'
    with pytest.raises(WireError, match="nested too deeply"):
        decode_client(opening + "[" * 1_000_000)
    prefix = encode(Act(id=1, episode="e", step=0, observation=7))
    assert prefix.endswith(b"\xabobservation\x07\xa6reward\xcb" + bytes(8))
    with pytest.raises(WireError, match="nested too deeply"):
        decode_client(prefix[: prefix.index(b"\x07\xa6")] + b"\x91" * 1_000_000)


def test_announced_sizes_are_not_believed():
    head = encode(Act(id=1, episode="e", step=0, observation=7))
    head = head[: head.index(b"\x07\xa6")]
    for huge in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"):  # array, map, bin, str, ext of 4 GB
        with pytest.raises(WireError, match="MessagePack"):
            decode_client(head + huge + b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        "",
        "null",
        "[]",
        "{}",
        b"\x80",
        b"\xc0",
        '{"type":"act"}',
        '{"type":"action","re":1,"episode":"e","step":0,"action":0,"phase":"collecting","policy_version":0}',
        '{"type":"bye","id":1,"more":1}',
        '{"type":"bye","id":-1}',
        '{"type":"bye","id":9007199254740992}',
        '{"type":"bye","id":1.5}',
        '{"type":"bye","id":true}',
        '{"type":"bye","id":"1"}',
        '{"type":"bye","id":1} {}',
        '{"type":"start_episode","id":1,"episode":""}',
        '{"type":"start_episode","id":1,"episode":"' + "e" * 201 + '"}',
        '{"type":"act","id":1,"episode":"e","step":0,"observation":NaN}',
        '{"type":"act","id":1,"episode":"e","step":0,"observation":0,"reward":1e999}',
        '{"type":"act","id":1,"episode":"e","step":0,"observation":' + "9" * 5000 + "}",
        '{"type":"bye","id":1,"\ud800":0}',
        b'{"type":"bye","id":1}',
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_a_message_of_a_client(data):
    with pytest.raises(WireError):
        decode_client(data)


class Trap:
    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_pickles_are_refused_and_nothing_runs():
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(Trap(), protocol)
        for decode in (decode_client, decode_server):
            with pytest.raises(WireError):
                decode(data)
        with pytest.raises(WireError):
            decode_value(data)
    assert not Trap.sprung
    with pytest.raises(TypeError, match="Trap cannot travel"):
        encode(Act(id=1, episode="e", step=0, observation=Trap()))
    with pytest.raises(TypeError, match="array of object"):
        encode(Act(id=1, episode="e", step=0, observation=np.array([None])))
    with pytest.raises(TypeError, match="datetime64"):
        encode(Act(id=1, episode="e", step=0, observation=np.datetime64("2020-01-01")))


def test_server_messages_may_grow_fields():
    text = '{"type":"done","re":1,"phase":"collecting","policy_version":0,"since_version_2":true}'
    assert decode_server(text).re == 1


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_vectors(vector):
    """The bytes that other languages' clients are tested with; they must never change within a version."""
    decode = decode_client if vector["from"] == "client" else decode_server
    binary = decode(bytes.fromhex(vector["msgpack"]))
    text = decode(json.dumps(vector["json"]))
    for field in binary.__struct_fields__:
        if getattr(binary, field) is msgspec.UNSET:  # left out
            assert getattr(text, field) is msgspec.UNSET
            continue
        assert equal(decode_value(getattr(binary, field)), decode_value(getattr(text, field))), field
    for field in ("observation", "action", "mask"):  # arrays, so that encoding them is part of the test
        if getattr(binary, field, msgspec.UNSET) is not msgspec.UNSET:
            setattr(binary, field, decode_value(getattr(binary, field)))
    assert encode(binary).hex() == vector["msgpack"]
    assert json.loads(encode(binary, as_json=True)) == vector["json"]


def test_vectors_are_complete():
    tags = {kind.__struct_config__.tag for kind in (*types("ClientMessage"), *types("ServerMessage"))}
    assert {v["json"]["type"] for v in VECTORS} == tags


def types(name: str):
    return getattr(messages, name).__args__


def test_base64_is_the_standard_alphabet():
    array = np.frombuffer(bytes(range(256)), np.uint8)
    text = json.loads(
        encode(Action(re=1, episode="e", step=0, action=array, phase="collecting", policy_version=0), True)
    )
    assert text["action"]["data"] == base64.b64encode(bytes(range(256))).decode()
