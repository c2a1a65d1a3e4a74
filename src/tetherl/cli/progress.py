# ruff: noqa: T201
"""Progress of a run on the terminal: one live block with rich, plain lines when it is not a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tetherl.algorithm import Algorithm, Callbacks

PLAIN_INTERVAL_S = 5.0
UNCHANGED_INTERVAL_S = 60.0


class Progress(Callbacks):
    """Shows a run on stderr, so that stdout stays free for results."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._quiet = quiet
        self._live: Live | None = None
        self._last_line = 0.0
        self._last_facts: list[tuple[str, str]] = []
        self._warned: set[str] = set()
        self._started = time.monotonic()

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def start(self) -> None:
        self._started = time.monotonic()
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_warning(self, algorithm: Algorithm, message: str) -> None:
        kind = message[:30]  # messages of one kind begin alike; each kind is said once
        if kind not in self._warned:
            self._warned.add(kind)
            self.say(f"warning: {message} (said once here; all are in {algorithm.run_dir.path / 'events.jsonl'})")

    def on_iteration(self, algorithm: Algorithm, metrics: dict[str, Any]) -> None:
        self._show(algorithm, force=algorithm.iteration == 1)

    def on_wait(self, algorithm: Algorithm) -> None:
        self._show(algorithm)

    def _show(self, algorithm: Algorithm, force: bool = False) -> None:
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(self._block(algorithm))
            return
        now = time.monotonic()
        if not force and now - self._last_line < PLAIN_INTERVAL_S:
            return
        facts = progress_facts(algorithm)
        if facts != self._last_facts or now - self._last_line >= UNCHANGED_INTERVAL_S:
            self._last_line, self._last_facts = now, facts
            text = " | ".join(f"{name} {value}" for name, value in facts)
            print(f"{now - self._started:.0f} s | {text}", file=sys.stderr, flush=True)

    def _block(self, algorithm: Algorithm) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row("[dim]time[/dim]", f"{time.monotonic() - self._started:.0f} s")
        for name, value in progress_facts(algorithm):
            table.add_row(f"[dim]{name}[/dim]", value)
        return table


def progress_facts(algorithm: Algorithm) -> list[tuple[str, str]]:
    """(name, text) of what a user wants to see while a run goes on."""
    books = algorithm.queue.snapshot()
    tracker = algorithm.tracker.metrics()
    dropped = sum(books["dropped"].values())
    reasons = ", ".join(f"{reason} {n}" for reason, n in books["dropped"].items() if n)
    facts = [
        ("iteration", f"{algorithm.iteration}, {algorithm.phase}"),
        ("return", f"{_number(tracker['episode_return_mean'])} over the last 100 of {tracker['episodes']} episodes"),
        (
            "steps",
            f"{books['received']} received, {books['trained']} trained, "
            f"{dropped} dropped{f' ({reasons})' if reasons else ''}, {books['pending']} pending",
        ),
    ]
    if algorithm.url is not None:
        clients = tracker.get("clients", 0)
        facts.append(("clients", str(clients) if clients else f"0 (waiting for clients at {algorithm.url})"))
    if algorithm.last_evaluation is not None:
        facts.append(("evaluation", _number(algorithm.last_evaluation)))
    total, machine = algorithm.plan.total, algorithm.machine
    facts.append(("planned", f"{total.cpus:g} of {machine.cpus:g} CPUs, {total.gpus:g} of {machine.gpus:g} GPUs"))
    return facts


def _number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.1f}"
