"""What a worker needs to know, as one message that travels to its process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tetherl.models.config import ModelConfig
from tetherl.server.config import ExternalConfig


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Settings of one worker. `env` is an id, "module:Name" or a callable; None for external clients."""

    index: int  # from 1; rollout workers and evaluation workers each count from 1
    seed: int
    model: ModelConfig
    env: Any = None
    env_config: dict[str, Any] = field(default_factory=dict)
    external: ExternalConfig | None = None
    worker_port: int = 0
    outbox_bytes: int = 1 << 30  # bound of finished fragments that wait to be taken
    open_bytes: int = 2 << 30  # bound of open episodes
    envs: int = 1
    batch_mode: str = "truncate_episodes"
    fragment_length: int = 128
    threads: int = 1
    device: str = "cpu"
