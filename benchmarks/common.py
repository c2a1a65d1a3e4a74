"""What the benchmarks share: options, a description of the machine, tables, and the page they write to."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import psutil

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


def parser(description: str, *, seconds: float) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--seconds", type=float, default=seconds, help="length of one measurement")
    options.add_argument("--rounds", type=int, default=3, help="times that everything is measured; medians are shown")
    options.add_argument("--json", action="store_true", help="one JSON document on stdout, all else on stderr")
    options.add_argument(
        "--write", nargs="?", const=PAGE, type=Path, metavar="FILE", help=f"update the tables in FILE ({PAGE.name})"
    )
    return options


class Conditions:
    """Under what conditions a benchmark ran. Make one before measuring, call `facts` while all processes live."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._busy, self._own = _busy_seconds(), _own_seconds()
        self._started = time.monotonic()

    def facts(self) -> dict[str, Any]:
        """Date, machine and load; `others_cpus` is the mean number of CPUs that other programs kept busy."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        others = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        return {
            "date": date.today().isoformat(),
            "machine": machine(),
            "load": {"before": self._load, "after": os.getloadavg()[0], "others_cpus": max(0.0, others / seconds)},
            "seconds": seconds,
        }


def machine() -> dict[str, Any]:
    """Hardware and versions; nothing that names the machine."""
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "numpy", "gymnasium", "aiohttp")},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _own_seconds() -> float:
    """CPU of this process and those it has started; ended ones count in their parents."""
    own = psutil.Process()
    return sum(cpu_seconds(process) for process in [own, *own.children(recursive=True)])


def cpu_seconds(process: psutil.Process) -> float:
    try:
        return float(sum(process.cpu_times()[:4]))  # user, system, and those of children that have ended
    except psutil.NoSuchProcess:
        return 0.0


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is readable as text, too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        header,
        ["-" * widths[0]] + ["-" * (w - 1) + ":" for w in widths[1:]],
        *rows,
    ]
    texts = []
    for line in lines:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("| " + " | ".join(cells) + " |")
    return "\n".join(texts)


def conditions_text(facts: dict[str, Any], options: argparse.Namespace) -> str:
    """One paragraph on a result's date, machine and load."""
    m, load = facts["machine"], facts["load"]
    return (
        f"Taken {facts['date']}: {options.rounds} rounds of {options.seconds:g} s, medians. Machine: {m['cpus']} cores "
        f"({m['cpu']}), {m['memory_gib']} GiB, {m['system']}; Python {m['python']}, torch {m['torch']}, "
        f"numpy {m['numpy']}, gymnasium {m['gymnasium']}, aiohttp {m['aiohttp']}. Load average {load['before']:.2f} "
        f"before, {load['after']:.2f} after; other programs kept {load['others_cpus']:.2f} cores busy meanwhile."
    )


def write_block(page: Path, name: str, text: str) -> None:
    """Puts `text` between the page's markers `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    before, after = _around(page, name)
    page.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")


def _around(page: Path, name: str) -> tuple[str, str]:
    """The page up to the first marker and from the second one on, both included."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = page.read_text(encoding="utf-8")
    if old.count(begin) != 1 or old.count(end) != 1:
        raise SystemExit(f"{page}: expected one line {begin!r} and one {end!r} around the table")
    return old.partition(begin)[0] + begin, end + old.partition(end)[2]


def say(text: str) -> None:
    """Progress; results go to stdout."""
    print(text, file=sys.stderr, flush=True)


def main(
    name: str, options: argparse.Namespace, measure: Callable[[], dict[str, Any]], tables: Callable[[Any], str]
) -> int:
    """Measures, prints the tables (or the JSON document), and updates the page if asked to."""
    if options.write is not None:
        _around(options.write, name)  # a page that cannot be updated is said before, not after
    try:
        document = measure()
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    text = tables(document) + "\n\n" + conditions_text(document, options)
    if options.write is not None:
        write_block(options.write, name, text)
        say(f"updated {options.write}")
    print(json.dumps(document) if options.json else text)
    return 0
