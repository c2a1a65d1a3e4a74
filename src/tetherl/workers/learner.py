"""Learner workers: shells around a learner each, and the group of them as the algorithm sees it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import gymnasium
import numpy as np
import torch

from tetherl.algorithms.config import AlgorithmConfig
from tetherl.algorithms.learner import LearnResult
from tetherl.algorithms.parallel import Reduction, Rendezvous
from tetherl.algorithms.ppo import PPOLearner
from tetherl.data.fragment import Fragment
from tetherl.errors import TrainingError
from tetherl.models.numerics import set_up_torch
from tetherl.models.policy import Policy
from tetherl.workers.group import CALL_TIMEOUT_S, Handle
from tetherl.workers.spec import WorkerSpec

LAST_WORDS_S = 5.0
"""One learner that fails makes the others fail: how long to wait for all before saying which was the cause."""

State = tuple[dict[str, np.ndarray], dict[str, Any]]


class LearnerWorker:
    """Holds one learner. With a rendezvous it is one of a group that makes every update together."""

    def __init__(
        self,
        spec: WorkerSpec,
        config: AlgorithmConfig,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        rendezvous: Rendezvous | None = None,
    ) -> None:
        set_up_torch(spec.threads, spec.device)
        self._rank = spec.index - 1
        self._rendezvous = rendezvous
        self._device = _device(spec)
        self._config = config
        self._max_seq_len = spec.model.max_seq_len
        self._seed = spec.seed
        self._policy = Policy(observation_space, action_space, spec.model, seed=spec.seed)
        self._reduction: Reduction | None = None
        self._learner: PPOLearner

    def start(self, state: State) -> None:
        """Meet the other workers and begin with `state`, which the first of them spreads."""
        if self._rendezvous is not None:
            self._reduction = self._rendezvous.join(self._rank)
        self._learner = PPOLearner(
            self._policy,
            self._config,
            max_seq_len=self._max_seq_len,
            seed=self._seed,
            device=self._device,
            reduction=self._reduction,
        )
        if self._rank == 0:
            self._learner.load_state(*state)
        self._learner.synchronise()

    def update(
        self, fragments: list[Fragment], version: int, steps_trained: int
    ) -> tuple[LearnResult, dict[str, np.ndarray]] | None:
        """See `Learner.update`; the first worker gives the result and the new weights, the others nothing."""
        try:
            result = self._learner.update(fragments, version=version, steps_trained=steps_trained)
        except BaseException:
            self.close()  # the others would wait for this one
            raise
        return (result, self._policy.weights()) if self._rank == 0 else None

    def state(self) -> State:
        """See `Learner.state`."""
        return self._learner.state()

    def close(self) -> None:
        """Leave the group; twice is fine."""
        if self._reduction is not None:
            self._reduction.close()


class LearnerGroup:
    """All learner workers of a run as one learner: the same calls as `Learner`.

    share: how a value is put where all workers can read it (`Engine.put`). policy: the algorithm's own copy, which
    gets the new weights after each update.
    """

    def __init__(self, workers: list[Handle], share: Callable[[Any], Any], policy: Policy) -> None:
        self._workers = workers
        self._share = share
        self._policy = policy
        self._failed = False

    def start(self, state: State) -> None:
        """Let the workers meet and begin with `state` (of `Learner.state`)."""
        self._all("start", self._share(state))

    def update(self, fragments: list[Fragment], *, version: int, steps_trained: int) -> LearnResult:
        """See `Learner.update`. Raises the error of the worker that failed first, or has died."""
        first, *_ = self._all("update", self._share(fragments), version, steps_trained)
        result: LearnResult
        result, weights = first
        self._policy.load_weights(weights)
        return result

    def state(self) -> State:
        """See `Learner.state`. TrainingError after an update that failed: its steps were made in part."""
        if self._failed:
            raise TrainingError("the learner workers have failed in an update; go on from the latest checkpoint")
        state: State = self._workers[0].call("state").result(CALL_TIMEOUT_S)
        return state

    def _all(self, method: str, *args: Any) -> list[Any]:
        futures = [worker.call(method, *args) for worker in self._workers]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        if any(f.exception() for f in done):
            self._failed = True
            raise self._cause(futures, done)
        assert not waiting
        return [f.result() for f in futures]

    def _cause(self, futures: list[Future[Any]], first: set[Future[Any]]) -> BaseException:
        """The error to tell: of a worker that is gone, else of the one that failed first."""
        done, _ = wait(futures, timeout=LAST_WORDS_S)
        gone = [f.exception() for f, w in zip(futures, self._workers, strict=True) if f in done and not w.alive()]
        early = [f.exception() for f in futures if f in first]
        errors = [e for e in (*gone, *early) if e is not None]
        return errors[0] if errors else TrainingError("a learner worker has failed")


def _device(spec: WorkerSpec) -> str:
    """Each learner of a group has a GPU of its own: the only one it sees, or that with its own number."""
    if spec.device == "cpu":
        return spec.device
    device = f"cuda:{(spec.index - 1) % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device
