"""What a worker needs to know, as one message that travels to its process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tetherl.models.config import ModelConfig
from tetherl.server.config import ExternalConfig


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Settings of one worker. `env` is an id, "module:Name" or a callable; None for external clients."""

    index: int  # from 1; rollout workers and evaluation workers each count from 1
    seed: int
    start: int = 0  # env steps taken before this start of the run
    model: ModelConfig
    env: Any = None
    env_config: dict[str, Any] = field(default_factory=dict)
    external: ExternalConfig | None = None
    worker_port: int = 0
    outbox_bytes: int = 1 << 30  # bound of finished fragments that wait to be taken
    open_bytes: int = 2 << 30  # bound of open episodes
    envs: int = 1
    vectorization: Literal["auto", "sync", "async", "own"] = "auto"
    batch_mode: str = "truncate_episodes"
    fragment_length: int = 128
    max_episode_steps: int = 0  # with complete_episodes: longer ones are cut; 0: no limit
    state_every: int = 0  # rows between recurrent states that travel with a fragment; 0: only that of the first row
    gamma: float = 0.0  # discount of the running return that fragments carry for reward scaling
    threads: int = 1
    device: str = "cpu"
