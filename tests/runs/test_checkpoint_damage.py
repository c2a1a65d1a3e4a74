"""Damaged, incomplete and doctored checkpoints: refused by number, passed over with a warning otherwise."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tetherl.errors import CheckpointError
from tetherl.runs import CheckpointStore

Damage = Callable[[Path], None]


def edit_manifest(path: Path, change: Callable[[dict], None]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def rewrite(path: Path, name: str, data: bytes) -> None:
    """Replace a file and make the manifest agree: the doctor is careful."""
    (path / name).write_bytes(data)
    edit_manifest(
        path,
        lambda m: m["files"].update({name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}}),
    )


def flip_last_byte(path: Path) -> None:
    data = bytearray((path / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "state.safetensors").write_bytes(data)


def shorten(path: Path) -> None:
    os.truncate(path / "state.safetensors", 10)


def link_out(path: Path) -> None:
    outside = path.parent.parent / "outside.json"
    shutil.move(path / "state.json", outside)
    (path / "state.json").symlink_to(outside)


def traversal(manifest: dict) -> None:
    manifest["files"]["../000001/state.json"] = manifest["files"].pop("state.json")


def extra_entry(manifest: dict) -> None:
    manifest["files"]["/etc/passwd"] = {"size": 1, "sha256": "00"}


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "no arrays": (lambda p: (p / "state.safetensors").unlink(), "state.safetensors is missing"),
    "no state": (lambda p: (p / "state.json").unlink(), "state.json is missing"),
    "empty directory": (lambda p: [file.unlink() for file in p.iterdir()], "manifest.json is missing"),
    "empty manifest": (lambda p: (p / "manifest.json").write_bytes(b""), "not a manifest"),
    "torn manifest": (lambda p: os.truncate(p / "manifest.json", 40), "not a manifest"),
    "deep manifest": (lambda p: (p / "manifest.json").write_bytes(b"[" * 60000), "not a manifest"),
    "huge manifest": (lambda p: (p / "manifest.json").write_bytes(b" " * 10**6), "far too many"),
    "one bit": (flip_last_byte, "SHA-256 differs"),
    "shortened": (shorten, "state.safetensors has 10 bytes"),
    "grown": (lambda p: os.truncate(p / "state.json", 500), "state.json has 500 bytes"),
    "state edited": (
        lambda p: (p / "state.json").write_text((p / "state.json").read_text().replace("iter", "ITER")),
        "SHA-256 differs",
    ),
    "extra file": (lambda p: (p / "model.pkl").write_bytes(b"cos\nsystem\n"), "holds 'model.pkl'"),
    "link out": (link_out, "state.json is not a plain file"),
    "directory for a file": (
        lambda p: ((p / "state.json").unlink(), (p / "state.json").mkdir()),
        "state.json is not a plain file",
    ),
    "traversal": (lambda p: edit_manifest(p, traversal), "expected exactly"),
    "absolute path": (lambda p: edit_manifest(p, extra_entry), "expected exactly"),
    "unknown key": (lambda p: edit_manifest(p, lambda m: m.update(code="import os")), "unknown field"),
    "negative size": (
        lambda p: edit_manifest(p, lambda m: m["files"]["state.json"].update(size=-1)),
        "-1 were written",
    ),
    "newer format": (
        lambda p: edit_manifest(p, lambda m: m.update(format=2, tetherl="7.1")),
        "by tetherl 7.1",
    ),
    "other iteration": (lambda p: edit_manifest(p, lambda m: m.update(iteration=99)), "iteration 99"),
    "pickle as state": (
        lambda p: rewrite(p, "state.json", b"\x80\x04cos\nsystem\n."),
        "state.json is not JSON",
    ),
    "list as state": (lambda p: rewrite(p, "state.json", b"[1]"), "holds a list"),
    "deep state": (lambda p: rewrite(p, "state.json", b"[" * 10**6), "state.json is not JSON"),
    "pickle as arrays": (
        lambda p: rewrite(p, "state.safetensors", b"\x80\x04cos\nsystem\n."),
        "state.safetensors cannot be decoded",
    ),
    "huge header": (
        lambda p: rewrite(p, "state.safetensors", b"\xff" * 64),
        "state.safetensors cannot be decoded",
    ),
}


@pytest.fixture
def three(tmp_path):
    """Checkpoints 1, 2, 3; 2 is the best, 3 the next best."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=0)
    for iteration, score in [(1, 1.0), (2, 5.0), (3, 3.0)]:
        store.save(iteration, {"w": np.full(8, iteration, np.float32)}, {"iteration": iteration}, score=score)
    return store


def reopened(store: CheckpointStore, **kwargs) -> tuple[CheckpointStore, list[str]]:
    warnings: list[str] = []
    return CheckpointStore(store.path, on_warning=warnings.append, **kwargs), warnings


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_latest_is_passed_over_by_name(three, name):
    damage, reason = DAMAGES[name]
    damage(three.path / "000003")
    store, warnings = reopened(three, keep=0)
    found = store.load("latest")
    assert (found.iteration, found.state) == (2, {"iteration": 2})
    assert len(found.warnings) == len(warnings) == 1
    for text in (found.warnings[0], warnings[0]):
        assert "000003" in text
        assert reason in text
    with pytest.raises(CheckpointError, match="000003") as caught:
        store.load(3)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_best_gives_way_to_the_next_best(three, name):
    damage, reason = DAMAGES[name]
    damage(three.path / "000002")
    store, warnings = reopened(three, keep=0)
    found = store.load("best")
    assert found.iteration == 3
    assert reason in "".join(found.warnings)
    assert list(found.warnings) == [text.removesuffix("; passed over") for text in warnings]
    assert store.load("latest").iteration == 3


def test_all_damaged_is_an_error_with_every_reason(three):
    flip_last_byte(three.path / "000003")
    shorten(three.path / "000002")
    (three.path / "000001" / "manifest.json").unlink()
    store, warnings = reopened(three)
    assert not store.empty  # so a run does not take this for a fresh start
    with pytest.raises(CheckpointError) as caught:
        store.load()
    for part in ("000003", "SHA-256", "000002", "10 bytes", "000001", "manifest.json is missing"):
        assert part in str(caught.value)
    assert len(warnings) == 3


def test_newest_folder_deleted_falls_back_to_the_one_before(three):
    shutil.rmtree(three.path / "000003")
    assert reopened(three)[0].load().iteration == 2


def test_damaged_ones_do_not_count_for_retention(three):
    flip_last_byte(three.path / "000003")
    (three.path / "000002" / "manifest.json").unlink()
    store, _ = reopened(three, keep=2, keep_best=0)
    assert store.load().iteration == 1
    store.save(4, {}, {})
    assert [info.iteration for info in store.list()] == [1, 4]  # neither damaged one pushed out the good one
    store.save(5, {}, {})
    assert sorted(os.listdir(store.path)) == ["000004", "000005"]  # now the damaged ones are the oldest


def test_damaged_one_is_replaced_by_a_save_of_its_number(three):
    flip_last_byte(three.path / "000003")
    store, _ = reopened(three)
    assert store.load().iteration == 2
    store.save(3, {}, {"again": True}, score=8.0)
    assert store.load().state == {"again": True}
    assert store.best().iteration == 3


def test_undamaged_store_gives_no_warning(three):
    store, warnings = reopened(three)
    assert store.load().iteration == 3
    assert store.load("best").iteration == 2
    assert warnings == []
