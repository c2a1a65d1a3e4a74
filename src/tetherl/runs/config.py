"""Settings of a run: when to save, when to stop."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `checkpoint` section."""

    interval: Annotated[
        int | str | None, Meta(description='iterations, or a time as "60s", between checkpoints; null: none')
    ] = 10
    keep: Annotated[int, Meta(ge=0, description="newest checkpoints kept; 0: all")] = 3
    keep_best: Annotated[int, Meta(ge=0, description="best checkpoints kept besides")] = 1
    score: Annotated[str, Meta(description="metric that decides which checkpoint is best")] = "episode_return_mean"
    mode: Annotated[Literal["max", "min"], Meta(description="whether a high or a low score is best")] = "max"
    at_end: Annotated[bool, Meta(description="save when the run ends, also on Ctrl-C and SIGTERM")] = True

    @property
    def interval_seconds(self) -> float | None:
        """Seconds of an interval such as "60s", "5m" or "2h"; None when it counts iterations (or is off).

        Raises ValueError for any other text.
        """
        if not isinstance(self.interval, str):
            return None
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smh])\s*", self.interval)
        if match is None or not float(match[1]):
            raise ValueError(f"{self.interval!r} is no duration such as '60s', '5m' or '2h'")
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


class StopConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `stop` section: whichever comes first. None of them set: until Ctrl-C."""

    env_steps: Annotated[PositiveInt | None, Meta(description="env steps received")] = None
    iterations: Annotated[PositiveInt | None, Meta(description="training iterations")] = None
    time_s: Annotated[Positive | None, Meta(description="seconds of this run, over all its resumes")] = None
    episode_return_mean: Annotated[
        float | None, Meta(description="mean return of the last 100 episodes, at least this")
    ] = None
