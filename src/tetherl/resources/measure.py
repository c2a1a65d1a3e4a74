"""Measures what the processes of a run really use."""

from __future__ import annotations

import psutil


class ProcessMeter:
    """CPU and memory of one run's processes, since the last reading."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, int], psutil.Process] = {}

    def watch(self, role: str, index: int, pid: int) -> None:
        """Measure process `pid` as `role` number `index`."""
        process = psutil.Process(pid)
        process.cpu_percent()  # the first call only sets the reference
        self._processes[role, index] = process

    def read(self) -> dict[str, float]:
        """`resources/ROLE/INDEX/cpu_percent` (100 = one CPU, since the last reading) and `.../rss_bytes`."""
        values: dict[str, float] = {}
        for (role, index), process in self._processes.items():
            try:
                with process.oneshot():
                    values[f"resources/{role}/{index}/cpu_percent"] = process.cpu_percent()
                    values[f"resources/{role}/{index}/rss_bytes"] = process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return values
