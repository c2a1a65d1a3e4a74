"""What this machine offers to this process: CPUs, GPUs, memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """CPUs are hardware threads; memory is in bytes, None: not known and not checked."""

    cpus: float
    gpus: float
    memory: int | None = None

    @classmethod
    def detect(cls) -> Machine:
        """What this process may use: CPU affinity, container limits and CUDA_VISIBLE_DEVICES count."""
        return cls(cpus=detect_cpus(), gpus=float(detect_gpus()), memory=detect_memory())

    def limited(self, settings: Any) -> Machine:
        """This machine with the numbers that the `machine` section sets in place of the detected ones."""
        return Machine(
            cpus=float(self.cpus if settings.cpus is None else settings.cpus),
            gpus=float(self.gpus if settings.gpus is None else settings.gpus),
            memory=self.memory if settings.memory is None else settings.memory,
        )


def detect_cpus(cgroup: Path = _CGROUP) -> float:
    """Hardware threads this process may run on, at most its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    count = float(len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
    for folder in _cgroups(cgroup):
        quota = _numbers(folder / "cpu.max") or (
            _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        )
        if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
            count = min(count, quota[0] / quota[1])
    return count


def detect_memory(cgroup: Path = _CGROUP) -> int | None:
    """Bytes of memory, at most the container's limit; None when the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for folder in _cgroups(cgroup):
        for limit in _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes"):
            total = min(total, limit)
    return total


def detect_gpus() -> int:
    """NVIDIA GPUs this process may use; 0 when there is none. Needs no torch."""
    present = _gpus_present()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    count = 0
    for name in visible.split(","):
        # CUDA stops at the first name that is no device
        if not name.strip() or name.strip() == "-1" or (name.strip().isdigit() and int(name) >= present):
            break
        count += 1
    return min(count, present)


def _gpus_present() -> int:
    command = shutil.which("nvidia-smi")
    if command is not None:
        try:
            listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=20, check=True)
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
        except (OSError, subprocess.SubprocessError):
            pass  # a driver that does not answer: the devices it made still count
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))


def _cgroups(root: Path) -> Iterator[Path]:
    """The control groups this process is in, from its own up to the root (both versions of the interface)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found = {root, root / "cpu", root / "memory"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / controllers if controllers else root
        own = base / path.strip("/")
        found.update([own, *(parent for parent in own.parents if parent.is_relative_to(base))])
    yield from found


def _numbers(path: Path) -> list[int]:
    """The numbers in a control file; empty when there is none or it says "max"."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []
