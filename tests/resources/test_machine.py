"""What a machine offers: affinity, container limits, visible GPUs."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from tetherl.config import MachineConfig
from tetherl.resources import machine
from tetherl.resources.machine import Machine, detect_cpus, detect_gpus, detect_memory


def test_this_machine_has_cpus_and_memory() -> None:
    found = Machine.detect()
    assert 0 < found.cpus <= (os.cpu_count() or 1)
    assert found.gpus >= 0
    assert found.memory is not None and found.memory > 2**27


def test_settings_replace_what_was_detected() -> None:
    detected = Machine(cpus=8, gpus=1, memory=100)
    assert detected.limited(MachineConfig()) == detected
    assert detected.limited(MachineConfig(cpus=2, gpus=0, memory=50)) == Machine(cpus=2, gpus=0, memory=50)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert detect_cpus() <= 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_container_quota_counts(tmp_path: Path) -> None:
    unlimited = detect_cpus(tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert detect_cpus(tmp_path) == unlimited
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert detect_cpus(tmp_path) == 0.5
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert detect_cpus(tmp_path) == unlimited
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("25000\n")
    assert detect_cpus(tmp_path) == 0.25


def test_a_container_memory_limit_counts(tmp_path: Path) -> None:
    total = detect_memory(tmp_path)
    assert total is not None
    (tmp_path / "memory.max").write_text("max\n")
    assert detect_memory(tmp_path) == total
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    assert detect_memory(tmp_path) == 2**20


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("1,7", 1), ("GPU-abc", 1), ("0,-1,1", 1)],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    monkeypatch.setattr(machine, "_gpus_present", lambda: 2)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect_gpus() == count


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell script")
def test_gpus_are_those_that_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "GPU 0: X (UUID: a)"\necho "  MIG 1g: (UUID: b)"\necho "GPU 1: X (UUID: c)"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert detect_gpus() == 2
    assert "torch" not in machine.__dict__
