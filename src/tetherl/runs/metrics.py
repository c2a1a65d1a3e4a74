"""The metrics of a run: metrics.jsonl, one line per iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tetherl.runs.jsonlines import JsonLines, to_json


class MetricsLog(JsonLines):
    """`metrics.jsonl`: one JSON object per iteration, for example

    {"iteration": 12, "env_steps": 144000, "episode_return_mean": 31.5, "learner/kl": 0.012, "lag/mean": 0.4}

    Numbers are written in full; NaN and infinities as null.
    """

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one iteration; the line survives the death of the process.

        RunError for a value that JSON cannot hold (names its key) and when the line cannot be written.
        """
        self.append_line({str(key): to_json(value, f"metric {key!r}") for key, value in metrics.items()})

    def truncate_after(self, iteration: int) -> int:
        """Drop the lines of iterations after `iteration`, in one step; returns how many were dropped.

        A run that resumes from the checkpoint of `iteration` plays those iterations again.
        """

        def is_kept(record: dict[str, Any]) -> bool:
            number = record.get("iteration")
            return not isinstance(number, int | float) or number <= iteration

        return self.keep_if(is_kept)
