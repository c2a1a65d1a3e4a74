"""CheckpointStore: round trip, choice of latest and best, retention, a disk that refuses."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import tetherl.runs.checkpoint_format as checkpoint_format
from tetherl.errors import CheckpointError, RunError
from tetherl.runs import CheckpointStore


def save(store: CheckpointStore, iteration: int, score: float | None = None) -> Path:
    return store.save(iteration, {"w": np.full(4, iteration, np.float32)}, {"iteration": iteration}, score=score)


def numbers(store: CheckpointStore) -> list[int]:
    """What lies on the disk, hidden left-overs included (as -1)."""
    return sorted(int(name) if name.isdigit() else -1 for name in os.listdir(store.path))


def test_every_dtype_and_shape_comes_back_exactly(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "f32": rng.normal(size=(3, 4)).astype(np.float32),
        "f64": rng.normal(size=(2, 1, 5)),
        "f16": np.array([1.5, -2], np.float16),
        "bool": np.array([True, False, True]),
        "i64": np.array([-(2**63), 2**63 - 1]),
        "u8": np.arange(256, dtype=np.uint8),
        "u64": np.array(2**64 - 1, np.uint64),
        "0d/f64": np.array(math.pi),
        "0d/bool": np.array(True),
        "0d/i64": np.array(-5),
        "numpy scalar": np.float64(2.5),
        "empty": np.zeros((0, 3), np.float32),
        "nan": np.array([np.nan, np.inf, -np.inf, -0.0]),
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "strided": np.arange(20)[::3],
        "reversed": np.arange(5)[::-1],
    }
    store = CheckpointStore(tmp_path)
    path = store.save(12, arrays, {})
    assert path == tmp_path / "000012"
    loaded = store.load().arrays
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype, name
        assert loaded[name].shape == array.shape, name
        assert loaded[name].tobytes() == array.tobytes(), name
        assert loaded[name].flags.writeable, name


def test_state_comes_back_exactly(tmp_path):
    state = {
        "numpy rng": np.random.default_rng(3).bit_generator.state,  # integers of 128 bits
        "beta": 0.1 + 0.2,
        "text": "ünï \U0001f600 \ud800",
        "deep": {"list": [1, 2.0, None, True, {"x": []}]},
    }
    store = CheckpointStore(tmp_path)
    store.save(0, {}, state, score=1.5)
    found = store.load()
    assert found.state == state
    assert (found.iteration, found.arrays, found.score, found.warnings) == (0, {}, 1.5, ())
    rng = np.random.default_rng(0)
    rng.bit_generator.state = found.state["numpy rng"]
    assert rng.random() == np.random.default_rng(3).random()


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"b": [1, math.nan]}}, r"state\['a'\]\['b'\]\[1\] is nan"),
        ({"a": math.inf}, r"state\['a'\] is inf"),
        ({"a": np.int64(3)}, r"state\['a'\] is a int64"),
        ({"a": np.zeros(2)}, r"state\['a'\] is a ndarray"),
        ({"a": {1: 2}}, r"state\['a'\] has the key 1"),
        ({"a": b"x"}, r"state\['a'\] is a bytes"),
    ],
)
def test_state_that_json_would_change_is_refused_by_name(tmp_path, state, named):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=named):
        store.save(1, {}, state)
    assert store.empty
    assert numbers(store) == []


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([None]), np.zeros(2, complex), np.zeros(2, np.longdouble), [1, 2]]
)
def test_array_that_is_no_numeric_array_is_refused_by_name(tmp_path, array):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="array 'moments' has"):
        store.save(1, {"moments": array}, {})
    with pytest.raises(CheckpointError, match="safetensors reserves this name"):
        store.save(1, {"__metadata__": np.zeros(2)}, {})
    assert numbers(store) == []


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "state.json",
        "state.safetensors",
    ]
    assert json.loads((path / "state.json").read_text()) == {"iteration": 1}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["iteration"] == 1
    assert set(manifest["files"]) == {"state.json", "state.safetensors"}


def test_latest_best_number_and_path(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)
    assert store.empty
    assert store.latest() is None
    assert store.best() is None
    for iteration, score in [(1, 5.0), (2, 9.0), (3, 7.0), (1_000_000, None)]:
        save(store, iteration, score)
    assert not store.empty
    assert [info.iteration for info in store.list()] == [1, 2, 3, 1_000_000]
    assert store.load().iteration == store.latest().iteration == 1_000_000
    assert store.load("best").iteration == store.best().iteration == 2
    assert store.load(3).score == 7.0
    assert store.load("3").state == {"iteration": 3}
    assert store.load(store.path / "000001").iteration == 1
    assert CheckpointStore(tmp_path, mode="min", read_only=True).load("best").iteration == 1
    with pytest.raises(CheckpointError, match=r"no checkpoint 4 in .*; there are: 1, 2, 3, 1000000"):
        store.load(4)
    with pytest.raises(CheckpointError, match="'latest', 'best', an iteration"):
        store.load("newest")


def test_checkpoint_moves_to_another_folder(tmp_path):
    path = save(CheckpointStore(tmp_path / "here"), 7)
    moved = shutil.move(path, tmp_path / "my best model")
    assert CheckpointStore(tmp_path / "there").load(moved).iteration == 7


def test_nothing_to_load_says_so(tmp_path):
    store = CheckpointStore(tmp_path)
    for which in ("latest", "best"):
        with pytest.raises(CheckpointError, match=r"there is no checkpoint.*in "):
            store.load(which)
    save(store, 1, math.nan)
    with pytest.raises(CheckpointError, match=r"no checkpoint with a score.*Load 'latest'"):
        store.load("best")


@pytest.mark.parametrize("mode", ["max", "min"])
def test_nan_and_infinite_scores_are_never_best(tmp_path, mode):
    store = CheckpointStore(tmp_path, keep=0, mode=mode)
    for iteration, score in enumerate([math.nan, 1.0, math.inf, -math.inf, None, math.nan]):
        save(store, iteration, score)
    assert store.load("best").iteration == 1
    assert store.load(2).score is None


@pytest.mark.parametrize(
    ("keep", "keep_best", "mode", "left"),
    [
        (2, 0, "max", [5, 6]),
        (2, 1, "max", [4, 5, 6]),  # 2 and 4 are equally good: the newer stays
        (2, 2, "max", [2, 4, 5, 6]),
        (2, 1, "min", [3, 5, 6]),
        (1, 1, "max", [4, 6]),
        (0, 1, "max", [1, 2, 3, 4, 5, 6]),
        (9, 0, "max", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_retention(tmp_path, keep, keep_best, mode, left):
    store = CheckpointStore(tmp_path, keep=keep, keep_best=keep_best, mode=mode)
    for iteration, score in enumerate([1.0, 9.0, -3.0, 9.0, math.nan, 0.0], start=1):
        save(store, iteration, score)
    assert numbers(store) == left


def test_the_one_just_saved_always_stays(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=0)
    save(store, 9)
    save(store, 5)  # a run that went back without cutting off what came after
    assert numbers(store) == [5, 9]
    save(store, 6)
    assert numbers(store) == [6, 9]


def test_same_iteration_again_replaces(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 3, 1.0)
    store.save(3, {"w": np.zeros(1)}, {"second": True}, score=2.0)
    assert numbers(store) == [3]
    assert store.load().state == {"second": True}
    assert store.load("best").score == 2.0


def test_truncate_after_removes_what_is_no_longer_the_past(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)
    for iteration in range(1, 6):
        save(store, iteration, float(iteration))
    (store.path / "000004" / "manifest.json").unlink()
    assert list(store.truncate_after(3)) == [4, 5]
    assert numbers(store) == [1, 2, 3]
    assert store.load("best").iteration == 3


def test_what_crashed_writers_left_is_removed_or_restored_at_open(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)
    for iteration in (1, 2, 3):
        save(store, iteration)
    shutil.copytree(tmp_path / "000003", tmp_path / ".writing-000004-99999")
    os.rename(tmp_path / "000001", tmp_path / ".deleted-000001-99999")
    shutil.copytree(tmp_path / "000002", tmp_path / ".replaced-000002-99999")
    os.rename(tmp_path / "000003", tmp_path / ".replaced-000003-99999")  # died between two renames
    (tmp_path / "notes.txt").write_text("mine")

    reader = CheckpointStore(tmp_path, read_only=True)
    assert reader.load().iteration == 3
    assert [info.iteration for info in reader.list()] == [2, 3]
    assert len(os.listdir(tmp_path)) == 6  # a reader changes nothing

    store = CheckpointStore(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["000002", "000003", "notes.txt"]
    assert store.load().iteration == 3


def test_reader_survives_a_checkpoint_that_is_replaced_while_it_reads(tmp_path, monkeypatch):
    writer = CheckpointStore(tmp_path, keep=1, keep_best=0)
    save(writer, 1)
    reader = CheckpointStore(tmp_path, read_only=True)
    real = checkpoint_format.read_manifest

    def slow(directory, iteration):
        manifest = real(directory, iteration)
        if directory.name == "000001":
            save(writer, 2)  # retention deletes 000001 under the reader's hands
        return manifest

    monkeypatch.setattr(checkpoint_format, "read_manifest", slow)
    found = reader.load()
    assert (found.iteration, found.warnings) == (2, ())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", range(1, 6))
def test_refusing_disk_leaves_the_last_good_one(tmp_path, monkeypatch, error, call):
    """fsync fails at each of its calls: three files, the new directory, the store's directory."""
    store = CheckpointStore(tmp_path, keep=1, keep_best=0)
    save(store, 1)
    real, calls = os.fsync, []

    def failing(fd):
        calls.append(fd)
        if len(calls) == call:
            raise OSError(error, os.strerror(error))
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(CheckpointError, match=os.strerror(error)) as caught:
            save(store, 2)
    assert str(store.path) in str(caught.value)
    assert "free space" in str(caught.value)
    assert -1 not in numbers(store)
    assert 1 in numbers(store)
    assert store.load(1).state == {"iteration": 1}
    save(store, 3)
    assert numbers(store) == [3]


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file"):
        CheckpointStore(tmp_path / "file" / "checkpoints")


def test_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def interrupt(fd):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(store, 2)
    assert numbers(store) == [1]


def test_failed_deletion_is_a_warning_and_the_save_stands(tmp_path, monkeypatch):
    warnings = []
    store = CheckpointStore(tmp_path, keep=1, keep_best=0, on_warning=warnings.append)
    save(store, 1)
    real = os.rename

    def rename(source, target):
        if ".deleted-" in str(target):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        assert save(store, 2).is_dir()
    assert len(warnings) == 1
    assert "000001" in warnings[0]
    save(store, 3)
    assert numbers(store) == [3]


def test_read_only_store_writes_nothing(tmp_path):
    store = CheckpointStore(tmp_path / "none", read_only=True)
    assert store.empty
    with pytest.raises(RunError, match="reading only"):
        save(store, 1)
    with pytest.raises(RunError, match="reading only"):
        store.truncate_after(0)
    assert not store.path.exists()


@pytest.mark.parametrize("bad", [{"keep": -1}, {"keep_best": -1}, {"mode": "maximum"}])
def test_meaningless_retention_is_refused(tmp_path, bad):
    with pytest.raises(RunError, match="expected"):
        CheckpointStore(tmp_path, **bad)
