"""When the policy is evaluated, and by whom. Evaluation never changes training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from tetherl.workers.evaluator import EvaluationResult
from tetherl.workers.group import CALL_TIMEOUT_S, Handle, answer


class Evaluation:
    """Every `interval` iterations the evaluators play `episodes` while training goes on; the score is reported with
    the iteration in which it is ready.

    `start_here` makes an evaluator in this process, for runs that have no evaluation workers and are asked to
    evaluate all the same.
    """

    def __init__(
        self,
        evaluators: list[Handle],
        *,
        interval: int | None,
        episodes: int,
        inline: bool,
        start_here: Callable[[], Handle],
    ) -> None:
        self._evaluators = evaluators
        self._interval = interval
        self._episodes = episodes
        self._inline = inline  # the evaluator lives in this process: a call blocks anyway
        self._start_here = start_here
        self._running: list[Future[Any]] = []
        self._latest: EvaluationResult | None = None
        self._reported: EvaluationResult | None = None

    def after_iteration(self, iteration: int, weights: Any, version: int) -> None:
        """Collect an evaluation that is ready; start one when it is due and none is running."""
        self._collect(timeout=0)
        if self._interval is not None and iteration % self._interval == 0 and not self._running:
            self._start(self._episodes, weights, version, explore=False)
            self._collect(timeout=None if self._inline else 0)

    def finish(self, timeout: float) -> None:
        """Give a running evaluation `timeout` seconds to end."""
        self._collect(timeout=timeout)

    def now(self, episodes: int, weights: Any, version: int, *, explore: bool) -> EvaluationResult:
        """Play `episodes` and wait for the result. ConfigError when the run names no environment for it."""
        if not self._evaluators:
            self._evaluators.append(self._start_here())
        self._collect(timeout=None)
        self._start(episodes, weights, version, explore=explore)
        self._collect(timeout=None)
        assert self._latest is not None
        return self._latest

    def metrics(self) -> dict[str, Any]:
        """An evaluation that has finished since the last call; each is reported once."""
        if self._latest is None or self._reported is self._latest:
            return {}
        self._reported = self._latest
        returns = self._latest.returns
        return {
            "evaluation/episode_return_mean": float(np.mean(returns)),
            "evaluation/episode_return_min": float(np.min(returns)),
            "evaluation/episode_return_max": float(np.max(returns)),
            "evaluation/episode_length_mean": float(np.mean(self._latest.lengths)),
            "evaluation/episodes": len(returns),
            "evaluation/policy_version": self._latest.version,
        }

    def _start(self, episodes: int, weights: Any, version: int, *, explore: bool) -> None:
        count = len(self._evaluators)
        shares = [episodes // count + (1 if i < episodes % count else 0) for i in range(count)]
        first = 0
        for evaluator, share in zip(self._evaluators, shares, strict=True):
            if share:
                # Calls to one worker run in order: the weights are in place before the first episode.
                answer(evaluator, "set_weights", evaluator.call("set_weights", weights, version), CALL_TIMEOUT_S)
                self._running.append(evaluator.call("evaluate", share, explore, first))
            first += share

    def _collect(self, *, timeout: float | None) -> None:
        if not self._running or wait(self._running, timeout).not_done:
            return
        parts = [f.result() for f in self._running]
        self._running = []
        self._latest = EvaluationResult(
            [r for p in parts for r in p.returns], [n for p in parts for n in p.lengths], parts[0].version
        )
