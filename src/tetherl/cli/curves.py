"""The learning curves of a run: what `tetherl plot` draws, and how it is drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_POINTS = 2000
"""Iterations drawn at most; of a longer run every second, third, ... is."""

AXES = {"env_steps": "env steps", "iteration": "iterations", "time/total_s": "seconds"}

Number = float | None


@dataclass(frozen=True)
class Panel:
    """One diagram. series: (label, metric); stacked: areas on top of each other."""

    title: str
    series: tuple[tuple[str, str], ...]
    stacked: bool = False


@dataclass(frozen=True)
class Curves:
    """metrics: name -> one value per drawn iteration, None where there was none; every: 1 of how many is drawn."""

    name: str
    metrics: dict[str, list[Number]]
    panels: list[Panel]
    every: int
    iterations: int

    @classmethod
    def of(cls, name: str, lines: Sequence[dict[str, Any]]) -> Curves:
        """From the lines of metrics.jsonl."""
        every = -(-len(lines) // MAX_POINTS)
        drawn = lines[::-1][::every][::-1]  # the last iteration is always drawn
        keys = sorted({key for line in drawn for key, value in line.items() if _number(value) is not None})
        metrics = {key: [_number(line.get(key)) for line in drawn] for key in keys}
        return cls(name, metrics, _panels(metrics), every, len(lines))


def _panels(metrics: dict[str, list[Number]]) -> list[Panel]:
    dropped = [key for key in metrics if key.startswith("steps/dropped/") and any(metrics[key])]
    fates = [("trained", "steps/trained"), ("pending", "steps/pending")]
    fates += [(f"dropped: {key.rpartition('/')[2]}", key) for key in dropped]
    panels = [
        Panel(
            "return",
            (("training, last 100 episodes", "episode_return_mean"), ("evaluation", "evaluation/episode_return_mean")),
        ),
        Panel(
            "episode length",
            (("training, last 100 episodes", "episode_length_mean"), ("evaluation", "evaluation/episode_length_mean")),
        ),
        Panel("KL divergence of an update", (("KL", "learner/kl"),)),
        Panel("entropy of the policy", (("entropy", "learner/entropy"),)),
        Panel("lag of the trained steps, in versions", (("mean", "lag/mean"), ("max", "lag/max"))),
        Panel("steps by fate", tuple(fates), stacked=True),
    ]
    return [
        Panel(panel.title, tuple((label, key) for label, key in panel.series if key in metrics), panel.stacked)
        for panel in panels
    ]


def _number(value: Any) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def write_png(curves: Curves, path: Path, axis: str) -> None:
    """The panels as one picture. OSError when it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), dpi=100, layout="constrained")
    figure.suptitle(curves.name)
    at = curves.metrics[axis]
    for axes, panel in zip(figure.subplots(2, 3).flat, curves.panels, strict=True):
        axes.set_title(panel.title, fontsize="medium")
        axes.set_xlabel(AXES[axis])
        axes.grid(alpha=0.3)
        if panel.stacked:
            layers = [[value or 0 for value in curves.metrics[key]] for _, key in panel.series]
            axes.stackplot(at, *layers, labels=[label for label, _ in panel.series], alpha=0.8)
        else:
            for label, key in panel.series:
                points = [(x, y) for x, y in zip(at, curves.metrics[key], strict=True) if y is not None]
                axes.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.2)
        if panel.series:
            axes.legend(fontsize="small", loc="best")
        else:
            axes.text(0.5, 0.5, "no values", ha="center", va="center", transform=axes.transAxes, alpha=0.6)
    figure.savefig(path, format="png")
