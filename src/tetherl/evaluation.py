"""When the policy is evaluated, and by whom. Evaluation never changes training."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from tetherl.workers.evaluator import EvaluationResult
from tetherl.workers.group import CALL_TIMEOUT_S, Handle


class Evaluation:
    """Every `interval` iterations the evaluators play `episodes` while training goes on; the score is reported with
    the iteration in which it is ready."""

    def __init__(self, evaluators: list[Handle], *, interval: int | None, episodes: int, inline: bool) -> None:
        self._evaluators = evaluators
        self._interval = interval
        self._episodes = episodes
        self._inline = inline  # the evaluator lives in this process: a call blocks anyway
        self._running: list[Future[Any]] = []
        self._latest: EvaluationResult | None = None

    def after_iteration(self, iteration: int, weights: Any, version: int) -> None:
        """Collect an evaluation that is ready; start one when it is due and none is running."""
        self._collect(block=False)
        if self._interval is not None and iteration % self._interval == 0 and not self._running:
            self._start(self._episodes, weights, version, explore=False)
            self._collect(block=self._inline)

    def now(self, episodes: int, weights: Any, version: int, *, explore: bool) -> EvaluationResult:
        """Play `episodes` and wait for the result."""
        self._collect(block=True)
        self._start(episodes, weights, version, explore=explore)
        self._collect(block=True)
        assert self._latest is not None
        return self._latest

    def metrics(self) -> dict[str, Any]:
        """The newest finished evaluation; empty before the first."""
        if self._latest is None:
            return {}
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
                evaluator.call("set_weights", weights, version).result(CALL_TIMEOUT_S)
                self._running.append(evaluator.call("evaluate", share, explore, first))
            first += share

    def _collect(self, *, block: bool) -> None:
        if not self._running or (not block and not all(f.done() for f in self._running)):
            return
        wait(self._running)
        parts = [f.result() for f in self._running]
        self._running = []
        self._latest = EvaluationResult(
            [r for p in parts for r in p.returns], [n for p in parts for n in p.lengths], parts[0].version
        )
