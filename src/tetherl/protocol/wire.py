"""Messages and arrays as bytes. No message and no array is trusted before it has been checked.

A NumPy array travels as a map with exactly the keys `dtype`, `shape`, `data`: the element type by name, the
shape, and the elements in C order, little-endian, as bytes in MessagePack and as base64 text in JSON.
Everything else (numbers, text, lists, maps with text keys) travels as itself. There is no pickle and no
extension type.
"""

from __future__ import annotations

import binascii
import math
import reprlib
import sys
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from tetherl.protocol.messages import ClientMessage, Count, ServerMessage

ALLOWED_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
"""Element types that may travel, by the name they travel under."""

MAX_RANK = 16
MAX_DEPTH = 32

_ARRAY_KEYS = frozenset(("dtype", "shape", "data"))
_PLAIN = frozenset((int, float, bool))
_Message = TypeVar("_Message")
_Decoder = msgspec.json.Decoder[_Message] | msgspec.msgpack.Decoder[_Message]


class WireError(ValueError):
    """Bytes or a value that are not of this protocol. `code` is the error code for the other side."""

    def __init__(self, message: str, code: str = "bad_message") -> None:
        super().__init__(message)
        self.code = code


class Envelope(msgspec.Struct):
    """What can still be read of a message that is refused as a whole."""

    type: str = ""
    id: Count | None = None
    protocol: Count | None = None


def encode_value(value: Any) -> Any:
    """`value` with every NumPy array (nested in lists, tuples and dicts) as a {dtype, shape, data} map."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_numpy(value)
    if isinstance(value, dict):
        return {key: encode_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_value(item) for item in value]
    return value


def decode_value(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """The inverse of `encode_value`: {dtype, shape, data} maps become read-only arrays; the rest is checked.

    The size that `dtype` and `shape` announce is compared with the data present before anything is allocated.

    Raises:
        WireError: a type that may not travel, nesting deeper than `max_depth`, or an array that is not one.
    """
    kind = type(value)
    if value is None or kind in _PLAIN or kind is str:
        return value
    if max_depth <= 0:
        raise WireError(f"value is nested too deeply; at most {MAX_DEPTH} levels are allowed")
    if kind is dict:
        if len(value) == 3 and value.keys() == _ARRAY_KEYS:
            return _decode_array(value["dtype"], value["shape"], value["data"])
        for key in value:
            if type(key) is not str:
                raise WireError(f"a map has the key {_short(key)}; keys must be text")
        return {key: decode_value(item, max_depth - 1) for key, item in value.items()}
    if kind is list:
        if _PLAIN.issuperset(map(type, value)):  # the usual case, without a Python-level loop
            return value
        return [decode_value(item, max_depth - 1) for item in value]
    what = "raw bytes" if kind is bytes else f"a {kind.__name__}"
    raise WireError(f"{what} cannot travel as a value; send numbers, text, lists, maps or {{dtype, shape, data}}")


def encode(message: Any, as_json: bool = False) -> bytes | str:
    """A message (any struct of `messages`) as a binary or, with `as_json`, a text WebSocket message."""
    if as_json:
        return _json_encoder.encode(message).decode("utf-8")
    return _msgpack_encoder.encode(message)


def decode_client(data: bytes | str) -> ClientMessage:
    """What a client sent; observations and actions are left as they travelled (see `decode_value`).

    Raises:
        WireError: anything but one well-formed message of a client.
    """
    if isinstance(data, str):
        return _decode(_client_json, data)
    return _decode(_client_msgpack, data)


def decode_server(data: bytes | str) -> ServerMessage:
    """What a server sent; actions are left as they travelled (see `decode_value`).

    Raises:
        WireError: anything but one well-formed message of a server.
    """
    if isinstance(data, str):
        return _decode(_server_json, data)
    return _decode(_server_msgpack, data)


def peek(data: bytes | str) -> Envelope:
    """Type, id and protocol of a message that `decode_client` refused; empty fields if even that fails."""
    try:
        return _decode(_envelope_json, data) if isinstance(data, str) else _decode(_envelope_msgpack, data)
    except WireError:
        return Envelope()


def _decode(decoder: msgspec.json.Decoder[_Message] | msgspec.msgpack.Decoder[_Message], data: Any) -> _Message:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:  # well-formed, but no message of ours
        raise WireError(f"not a message of this protocol: {error}") from None
    except RecursionError:
        raise WireError(f"message is nested too deeply; at most {MAX_DEPTH} levels are allowed") from None
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        encoding = "JSON (text message)" if isinstance(data, str) else "MessagePack (binary message)"
        raise WireError(f"not {encoding}: {error}") from None


def _encode_numpy(value: np.ndarray[Any, Any] | np.generic) -> Any:
    if isinstance(value, np.generic):
        if value.dtype.name in ALLOWED_DTYPES:
            return value.item()
        raise TypeError(f"a NumPy {value.dtype} cannot travel; allowed: {', '.join(ALLOWED_DTYPES)}")
    wire_dtype = ALLOWED_DTYPES.get(value.dtype.name)
    if wire_dtype is None:
        raise TypeError(f"an array of {value.dtype} cannot travel; allowed: {', '.join(ALLOWED_DTYPES)}")
    flat = np.ascontiguousarray(value, dtype=wire_dtype).reshape(-1).view(np.uint8)
    return {"dtype": value.dtype.name, "shape": value.shape, "data": flat.data}


def _enc_hook(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_numpy(value)
    raise TypeError(f"a {type(value).__name__} cannot travel; use numbers, text, lists, maps or NumPy arrays")


def _decode_array(dtype_name: Any, shape: Any, data: Any) -> np.ndarray[Any, Any]:
    dtype = ALLOWED_DTYPES.get(dtype_name) if type(dtype_name) is str else None
    if dtype is None:
        raise WireError(f"array dtype {_short(dtype_name)} is not allowed; use one of {', '.join(ALLOWED_DTYPES)}")
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise WireError(f"array shape {_short(shape)} is not a list of at most {MAX_RANK} sizes")
    for size in shape:
        if type(size) is not int or not 0 <= size < 2**31:
            raise WireError(f"array shape {_short(shape)} has {_short(size)} where a size (0 or more) is expected")
    if math.prod(size or 1 for size in shape) > 2**40:  # a zero elsewhere must not hide it
        raise WireError(f"array shape {_short(shape)} is too large")
    expected = math.prod(shape) * dtype.itemsize
    if type(data) is str:
        data = _decode_base64(data, expected, dtype_name, shape)
    elif type(data) is not bytes:
        raise WireError(f"array data is a {type(data).__name__}; expected bytes (MessagePack) or base64 text (JSON)")
    if len(data) != expected:
        _wrong_size(dtype_name, shape, expected, len(data))
    array = np.frombuffer(data, dtype=dtype).reshape(shape)
    if dtype_name == "bool" and array.size and array.view(np.uint8).max() > 1:
        raise WireError("an array of bool has bytes other than 0 and 1")
    if sys.byteorder == "big":
        array = array.astype(dtype.newbyteorder("="))
        array.flags.writeable = False
    return array


def _decode_base64(text: str, expected: int, dtype_name: str, shape: list[int]) -> bytes:
    length = len(text)
    padding = 2 if text.endswith("==") else 1 if text.endswith("=") else 0
    if length % 4 or length // 4 * 3 - padding != expected:
        _wrong_size(dtype_name, shape, expected, max(0, length * 3 // 4 - padding))
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise WireError(f"array data is not base64: {error}") from None


def _wrong_size(dtype_name: str, shape: list[int], expected: int, found: int) -> NoReturn:
    raise WireError(
        f"an array of {dtype_name} with shape {_short(shape)} has {expected} bytes, but the data has {found}"
    )


def _short(value: Any) -> str:
    """A representation that stays short whatever came."""
    return _repr.repr(value)


_repr = reprlib.Repr()
_repr.maxlist = MAX_RANK

_msgpack_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_json_encoder = msgspec.json.Encoder(enc_hook=_enc_hook)
_client_msgpack = msgspec.msgpack.Decoder(ClientMessage)
_client_json = msgspec.json.Decoder(ClientMessage)
_server_msgpack = msgspec.msgpack.Decoder(ServerMessage)
_server_json = msgspec.json.Decoder(ServerMessage)
_envelope_msgpack = msgspec.msgpack.Decoder(Envelope)
_envelope_json = msgspec.json.Decoder(Envelope)
