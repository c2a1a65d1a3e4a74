"""Starts and stops the processes of a run: rollout workers, evaluation workers, front door."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tetherl.config import RunConfig
from tetherl.engine.inline import InlineEngine
from tetherl.engine.local import LocalEngine
from tetherl.evaluation import Evaluation
from tetherl.resources.plan import serving_bytes
from tetherl.server.front_door import FrontDoor
from tetherl.server.listen import load_token
from tetherl.workers.evaluator import Evaluator
from tetherl.workers.group import RolloutGroup
from tetherl.workers.rollout import RolloutWorker
from tetherl.workers.serving import ServingWorker
from tetherl.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from tetherl.algorithm import Algorithm

START_TIMEOUT_S = 300.0
"""Longest wait for a worker's constructor: importing torch on a busy machine can take a minute."""

SERVING_THREADS = 6
"""Calls that a serving worker answers at once: an open `sample`, and weights and phases beside it."""


class Team:
    """All processes but the algorithm's own. Stop order: front door, rollout workers, evaluation workers."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        # With no workers at all everything runs here; the engine's name then makes no difference.
        self.engine: Any = InlineEngine() if config.engine == "inline" else LocalEngine()
        self._here = InlineEngine()
        self.url: str | None = None
        self.worker_urls: list[str] = []
        self._door: FrontDoor | None = None
        self._actors: list[tuple[str, int, Any]] = []
        self.rollouts: RolloutGroup
        self.evaluation: Evaluation

    @classmethod
    def start(cls, algorithm: Algorithm) -> Team:
        """Start everything and wait until it is ready; on failure nothing is left behind."""
        team = cls(algorithm.config)
        try:
            team._start_rollouts(algorithm)
            team._start_evaluation()
            for _, _, actor in team._actors:
                actor.ready.result(START_TIMEOUT_S)
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
        """Stop everything; twice is fine."""
        if self._door is not None:
            self._door.stop()
            self._door = None
        self.engine.close()
        self._here.close()

    def _spec(self, index: int, **more: Any) -> WorkerSpec:
        rollouts = self.config.rollouts
        return WorkerSpec(
            index=index,
            seed=self.config.seed,
            model=self.config.model,
            batch_mode=rollouts.batch_mode,
            fragment_length=rollouts.fragment_length,
            **more,
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
                    threads=threads,
                    device=device,
                )
                # One thread samples, the other lets `interrupt` in; inline, calls run one after the other.
                concurrency = 1 if engine is self._here or config.engine == "inline" else 2
                actor = engine.start(RolloutWorker, spec, name=name, max_concurrency=concurrency, env=_threads(threads))
            workers[index] = actor
            self._actors.append(("rollout", index, actor))
        self.rollouts = RolloutGroup(workers, algorithm.queue, algorithm.accept)

    def _start_evaluation(self) -> None:
        evaluation = self.config.evaluation
        env = evaluation.env if evaluation.env is not None else self.config.env
        evaluators: list[Any] = []
        if evaluation.interval is not None or evaluation.workers:
            engine = self.engine if evaluation.workers else self._here
            threads = max(1, int(evaluation.cpus_per_worker if evaluation.workers else self.config.algorithm.cpus))
            for index in range(1, max(1, evaluation.workers) + 1):
                spec = self._spec(
                    index,
                    env=env,
                    env_config=evaluation.env_config if evaluation.env is not None else self.config.env_config,
                    envs=min(8, -(-evaluation.episodes // max(1, evaluation.workers))),
                    threads=threads,
                    device=self._device(evaluation.gpus_per_worker if evaluation.workers else 0),
                )
                actor = engine.start(Evaluator, spec, name=f"evaluation worker {index}", env=_threads(threads))
                evaluators.append(actor)
                self._actors.append(("evaluation", index, actor))
        self.evaluation = Evaluation(
            evaluators,
            interval=evaluation.interval,
            episodes=evaluation.episodes,
            inline=not evaluation.workers or self.config.engine == "inline",
        )

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
