"""Run directories: configuration, metrics, events and checkpoints of one training run on disk."""

from __future__ import annotations

from tetherl.runs.checkpoint_format import Checkpoint
from tetherl.runs.checkpoints import CheckpointInfo, CheckpointStore
from tetherl.runs.directory import RunDirectory, RunSummary, list_runs
from tetherl.runs.events import EventLog, describe
from tetherl.runs.metrics import MetricsLog

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointStore",
    "EventLog",
    "MetricsLog",
    "RunDirectory",
    "RunSummary",
    "describe",
    "list_runs",
]
