"""Starts and stops the processes of a run: learner, rollout and evaluation workers, front door."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from tetherl.algorithms.parallel import ProcessRendezvous, Rendezvous, ThreadRendezvous
from tetherl.config import RunConfig
from tetherl.engine.inline import InlineEngine
from tetherl.engine.local import LocalEngine
from tetherl.errors import ConfigError
from tetherl.evaluation import Evaluation
from tetherl.resources.plan import serving_bytes
from tetherl.server.front_door import FrontDoor
from tetherl.server.listen import load_token
from tetherl.workers.evaluator import Evaluator
from tetherl.workers.group import RolloutGroup
from tetherl.workers.learner import LearnerGroup, LearnerWorker
from tetherl.workers.rollout import RolloutWorker
from tetherl.workers.serving import ServingWorker
from tetherl.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from tetherl.algorithm import Algorithm

START_TIMEOUT_S = 300.0
"""Longest wait for a worker's constructor: importing torch on a busy machine can take a minute."""

_LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo")
"""Learner workers of one machine talk over its loopback interface only."""

SERVING_THREADS = 6
"""Calls that a serving worker answers at once: an open `sample`, and weights and phases beside it."""


class Team:
    """All processes but the algorithm's own. Stop order: the front door, then all workers."""

    def __init__(self, config: RunConfig, start: int = 0) -> None:
        self.config = config
        self._start = start  # env steps taken before
        # With no workers at all everything runs here; the engine's name then makes no difference.
        self.engine: Any = InlineEngine() if config.engine == "inline" else LocalEngine()
        self._here = InlineEngine()
        self.url: str | None = None
        self.worker_urls: list[str] = []
        self._door: FrontDoor | None = None
        self._actors: list[tuple[str, int, Any]] = []
        self._meeting_place: str | None = None
        self.learners: LearnerGroup | None = None  # None: the algorithm process learns
        self.rollouts: RolloutGroup
        self.evaluation: Evaluation

    @classmethod
    def start(cls, algorithm: Algorithm) -> Team:
        """Start everything and wait until it is ready; on failure nothing is left behind."""
        team = cls(algorithm.config, algorithm.queue.received)
        try:
            team._start_learners(algorithm)
            team._start_rollouts(algorithm)
            team._start_evaluation()
            for _, _, actor in team._actors:
                actor.ready.result(START_TIMEOUT_S)
            if team.learners is not None:
                team.learners.start(algorithm.learner.state())
            if team.config.external is not None:
                team._open_door(algorithm)
        except BaseException:
            team.close()
            raise
        return team

    def pids(self) -> list[tuple[str, int, int]]:
        """(role, index, process id) of the processes that were started."""
        own = os.getpid()
        return [(role, index, a.pid) for role, index, a in self._actors if a.pid and a.pid != own]

    def close(self) -> None:
        """Stop everything, also when something goes wrong on the way; twice is fine."""
        with contextlib.ExitStack() as stack:  # runs from the last to the first
            if self._meeting_place is not None:
                stack.callback(shutil.rmtree, self._meeting_place, ignore_errors=True)
            stack.callback(self._here.close)
            stack.callback(self.engine.close)
            if self._door is not None:
                stack.callback(self._door.stop)

    def _spec(self, index: int, **more: Any) -> WorkerSpec:
        rollouts = self.config.rollouts
        return WorkerSpec(
            index=index,
            seed=self.config.seed,
            start=self._start,
            model=self.config.model,
            batch_mode=rollouts.batch_mode,
            fragment_length=rollouts.fragment_length,
            gamma=self.config.algorithm.gamma,
            state_every=self._state_every(),
            **more,
        )

    def _state_every(self) -> int:
        """Rows between the recurrent states that fragments carry: one wherever a chunk, or its burn-in, can begin."""
        if self.config.algorithm.state_source != "stored":
            return 0
        return math.gcd(self.config.model.max_seq_len, self.config.algorithm.burn_in)

    def _start_learners(self, algorithm: Algorithm) -> None:
        learners = self.config.learners
        if not learners.workers:
            return
        threads = max(1, int(learners.cpus_per_worker))
        device = self._device(learners.gpus_per_worker)
        rendezvous = self._rendezvous(learners.workers, device)
        actors: list[Any] = []
        for index in range(1, learners.workers + 1):
            actor = self.engine.start(
                LearnerWorker,
                self._spec(index, threads=threads, device=device),
                self.config.algorithm,
                algorithm.observation_space,
                algorithm.action_space,
                rendezvous,
                name=f"learner worker {index}",
                # In one process they must run at the same time, each in a thread: they wait for each other.
                max_concurrency=2 if isinstance(rendezvous, ThreadRendezvous) else 1,
                env={**_threads(threads), **_LOOPBACK},
            )
            actors.append(actor)
            self._actors.append(("learner", index, actor))
        self.learners = LearnerGroup(actors, self.engine.put, algorithm.policy)

    def _rendezvous(self, size: int, device: str) -> Rendezvous | None:
        if size == 1:
            return None
        if self.config.engine == "inline":
            return ThreadRendezvous(size)
        self._meeting_place = tempfile.mkdtemp(prefix="tetherl-learners-")
        return ProcessRendezvous(
            os.path.join(self._meeting_place, "meeting"), size, "gloo" if device == "cpu" else "nccl"
        )

    def _start_rollouts(self, algorithm: Algorithm) -> None:
        config, rollouts = self.config, self.config.rollouts
        engine = self.engine if rollouts.workers else self._here
        threads = max(1, int(rollouts.cpus_per_worker if rollouts.workers else config.algorithm.cpus))
        device = self._device(rollouts.gpus_per_worker if rollouts.workers else config.algorithm.gpus)
        workers: dict[int, Any] = {}
        for index in range(1, max(1, rollouts.workers or 0) + 1):
            name = f"rollout worker {index}"
            if config.external is not None:
                port = config.external.worker_port
                open_bytes, outbox_bytes = serving_bytes(config, config.row_bytes())
                spec = self._spec(
                    index,
                    external=config.external,
                    open_bytes=open_bytes,
                    outbox_bytes=outbox_bytes,
                    worker_port=port + index - 1 if port else 0,
                    threads=threads,
                    device=device,
                )
                token = load_token(config.external)
                actor = engine.start(
                    ServingWorker,
                    spec,
                    token,
                    name=name,
                    max_concurrency=SERVING_THREADS,
                    env=_threads(threads),
                )
            else:
                spec = self._spec(
                    index,
                    env=config.env,
                    env_config=config.env_config,
                    envs=rollouts.envs_per_worker or 1,
                    vectorization=rollouts.vectorization,
                    max_episode_steps=self._episode_limit(),
                    threads=threads,
                    device=device,
                )
                # One thread samples, the other lets `interrupt` in; inline, calls run one after the other.
                concurrency = 1 if engine is self._here or config.engine == "inline" else 2
                actor = engine.start(RolloutWorker, spec, name=name, max_concurrency=concurrency, env=_threads(threads))
            workers[index] = actor
            self._actors.append(("rollout", index, actor))
        self.rollouts = RolloutGroup(workers, algorithm.queue, algorithm.accept)

    def _episode_limit(self) -> int:
        """Steps after which an episode is cut when whole episodes are collected; 0: fragments are cut anyway."""
        if self.config.rollouts.batch_mode != "complete_episodes":
            return 0
        return self.config.spaces().horizon or max(self.config.algorithm.train_batch_size or 0, 1000)

    def _start_evaluation(self) -> None:
        evaluation = self.config.evaluation
        evaluators: list[Any] = []
        if evaluation.workers:
            threads = max(1, int(evaluation.cpus_per_worker))
            for index in range(1, evaluation.workers + 1):
                spec = self._evaluation_spec(index, threads, self._device(evaluation.gpus_per_worker))
                actor = self.engine.start(Evaluator, spec, name=f"evaluation worker {index}", env=_threads(threads))
                evaluators.append(actor)
                self._actors.append(("evaluation", index, actor))
        elif evaluation.interval is not None:
            evaluators.append(self._evaluator_here())
        self.evaluation = Evaluation(
            evaluators,
            interval=evaluation.interval,
            episodes=evaluation.episodes,
            inline=not evaluation.workers or self.config.engine == "inline",
            start_here=self._evaluator_here,
        )

    def _evaluation_spec(self, index: int, threads: int, device: str) -> WorkerSpec:
        evaluation = self.config.evaluation
        own = evaluation.env is not None
        env = evaluation.env if own else self.config.env
        if env is None:
            raise ConfigError(
                "this run names no environment that tetherl could evaluate in: set evaluation.env to a Gymnasium id"
            )
        return self._spec(
            index,
            env=env,
            env_config=evaluation.env_config if own else self.config.env_config,
            envs=min(8, -(-evaluation.episodes // max(1, evaluation.workers))),
            threads=threads,
            device=device,
        )

    def _evaluator_here(self) -> Any:
        threads = max(1, int(self.config.algorithm.cpus))
        spec = self._evaluation_spec(1, threads, "cpu")
        actor = self._here.start(Evaluator, spec, name="evaluation in the algorithm process")
        actor.ready.result()
        return actor

    def _open_door(self, algorithm: Algorithm) -> None:
        external = self.config.external
        assert external is not None
        self.worker_urls = [worker.call("url").result(START_TIMEOUT_S) for worker in self.rollouts.workers.values()]
        self._door = FrontDoor(
            external.address,
            external.port,
            load_token(external),
            self.worker_urls,
            allow_open=external.allow_open,
            hello_timeout_s=external.hello_timeout_s,
        )
        self.url = self._door.start()

    def _device(self, gpus: float) -> str:
        return "cuda" if gpus and self.config.device != "cpu" else "cpu"


def _threads(threads: int) -> dict[str, str]:
    """Numeric libraries read these before they start."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
