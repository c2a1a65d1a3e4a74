"""One checkpoint on disk: what its three files hold, and how it is proved complete before anything is used.

    000012/state.safetensors   the arrays
           state.json          everything else
           manifest.json       written last: size and hash of the other two

All of it is data: nothing in a checkpoint can name code, and nothing outside its directory is ever opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tetherl.errors import CheckpointError, MissingExtraError
from tetherl.runs.files import sync_directory, write_file

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "state.safetensors"
STATE = "state.json"

_MAX_MANIFEST_BYTES = 64 * 1024


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a checkpoint: its size in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest of any format says, so that one from a newer tetherl is recognised as such."""

    format: int
    tetherl: str = "an unknown version"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`manifest.json`, for example

    {"format": 1, "iteration": 12, "score": 31.5, "created": "2026-03-01T14:05:09+00:00", "tetherl": "0.1.0",
     "files": {"state.safetensors": {"size": 8867104, "sha256": "9f86…"}, "state.json": {…}}}
    """

    format: int
    iteration: int
    score: float | None
    created: str
    tetherl: str
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `warnings` says which ones were passed over to get here, and why."""

    iteration: int
    arrays: dict[str, np.ndarray]
    state: dict[str, Any]
    score: float | None
    path: Path
    warnings: tuple[str, ...] = ()


def encode_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """`arrays` (any shape, 0-d too; bool, int, uint, float of at most 64 bits) as a safetensors file."""
    plain: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray | np.generic) or not _storable(array.dtype):
            what = f"dtype {array.dtype}" if hasattr(array, "dtype") else f"type {type(array).__name__}"
            raise CheckpointError(
                f"checkpoint array {name!r} has {what}: expected a numpy array of numbers or booleans"
            )
        if name == "__metadata__":  # would be written, and could not be read back
            raise CheckpointError(f"checkpoint array {name!r}: safetensors reserves this name; choose another")
        # safetensors writes the buffer as it lies in memory, so a transposed view would come back scrambled.
        plain[name] = np.asarray(array, order="C")
    safetensors = _safetensors()
    try:
        return bytes(safetensors.save(plain))
    except Exception as error:  # its own error type
        raise CheckpointError(f"the arrays cannot be written as safetensors: {error}") from error


def encode_state(state: Mapping[str, Any]) -> bytes:
    """`state` as JSON that reads back equal; CheckpointError names the key of a value that would not."""
    _check_json(state, "state")
    return json.dumps(state, allow_nan=False).encode()


def write_checkpoint(directory: Path, *, iteration: int, arrays: bytes, state: bytes, score: float | None) -> None:
    """Write the three files into the empty `directory` and wait for the disk; the manifest comes last."""
    contents = {ARRAYS: arrays, STATE: state}
    for name, data in contents.items():
        write_file(directory / name, data)
    manifest = Manifest(
        format=FORMAT,
        iteration=iteration,
        score=score,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tetherl=_version(),
        files={name: FileRecord(size=len(data), sha256=_sha256(data)) for name, data in contents.items()},
    )
    write_file(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    sync_directory(directory)


def read_manifest(directory: Path, iteration: int | None = None) -> Manifest:
    """The manifest, after the cheap checks: format, exactly the files that belong there, and their sizes.

    `iteration` is what the directory's name promises; None when it may have been renamed.
    CheckpointError gives the reason only; the caller names the checkpoint.
    """
    try:
        present = {entry.name: entry.lstat() for entry in directory.iterdir()}
        for name in (MANIFEST, STATE, ARRAYS):
            if name not in present:
                raise CheckpointError(f"{name} is missing")
            if not stat.S_ISREG(present[name].st_mode):
                raise CheckpointError(f"{name} is not a plain file")
        unknown = sorted(set(present) - {MANIFEST, STATE, ARRAYS})
        if unknown:
            raise CheckpointError(f"it holds {unknown[0]!r}, which is no part of a checkpoint")
        if present[MANIFEST].st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{MANIFEST} has {present[MANIFEST].st_size} bytes, far too many")
        raw = (directory / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror or error}") from error
    manifest = _decode_manifest(raw)
    if iteration is not None and manifest.iteration != iteration:
        raise CheckpointError(f"its manifest is that of iteration {manifest.iteration}")
    for name, record in manifest.files.items():
        if present[name].st_size != record.size:
            raise CheckpointError(f"{name} has {present[name].st_size} bytes, {record.size} were written")
    return manifest


def read_checkpoint(directory: Path, iteration: int | None = None) -> Checkpoint:
    """The whole checkpoint, decoded only after its hashes were checked; its arrays are writable.

    `iteration` and errors as in `read_manifest`.
    """
    manifest = read_manifest(directory, iteration)
    contents: dict[str, bytes] = {}
    for name, record in manifest.files.items():
        try:
            data = (directory / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error
        if _sha256(data) != record.sha256:
            raise CheckpointError(f"{name} is not what was written (its SHA-256 differs)")
        contents[name] = data
    try:
        state = json.loads(contents[STATE])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{STATE} is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{STATE} holds a {type(state).__name__}, expected an object")
    safetensors = _safetensors()
    try:
        arrays = safetensors.load(contents[ARRAYS])
    except Exception as error:  # safetensors' own error type, KeyError for a dtype numpy does not have
        raise CheckpointError(f"{ARRAYS} cannot be decoded: {error}") from error
    return Checkpoint(manifest.iteration, arrays, state, manifest.score, directory)


def _decode_manifest(raw: bytes) -> Manifest:
    try:
        head = msgspec.json.decode(raw, type=_Head)
        if head.format != FORMAT:
            raise CheckpointError(
                f"it has format {head.format}, written by tetherl {head.tetherl}; tetherl {_version()} here "
                f"reads format {FORMAT}. Load it with that version"
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST} is not a manifest: {error}") from error
    if set(manifest.files) != {ARRAYS, STATE}:
        raise CheckpointError(f"{MANIFEST} lists {sorted(manifest.files)}, expected exactly {[STATE, ARRAYS]}")
    return manifest


def _storable(dtype: np.dtype) -> bool:
    return dtype.kind in "biuf" and dtype.itemsize <= 8  # not object, text, complex, long double


def _check_json(value: Any, where: str) -> None:
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(f"{where} is {value}, which JSON cannot hold: store None or leave the key out")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}: JSON would turn it into text, use a str")
            _check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    else:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold: put arrays under arrays, "
            "and convert numpy numbers with .item()"
        )


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise MissingExtraError("reading and writing checkpoints", "train") from None
    return safetensors.numpy


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version() -> str:
    try:
        return metadata.version("tetherl")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
