"""Where user code hooks into a run, and what a run answers at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tetherl.algorithm import Algorithm


class Callbacks:
    """User code hooks in here: override what you need and pass an instance to Algorithm."""

    def on_iteration(self, algorithm: Algorithm, metrics: dict[str, Any]) -> None:
        """After each training iteration; what is added to `metrics` is logged with them."""

    def on_episode_end(self, algorithm: Algorithm, episode_return: float, length: int) -> None:
        """After each finished training episode."""

    def on_warning(self, algorithm: Algorithm, message: str) -> None:
        """Something that the user should know; possibly from another thread."""

    def on_wait(self, algorithm: Algorithm) -> None:
        """About once a second while a batch fills; keep it short."""


@dataclass
class RunResult:
    """How a run ended."""

    reason: str
    already_finished: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
