"""The driver of a run: assembles batches, steers learning, evaluation and checkpoints. The file to read first.

    with Algorithm(RunConfig(env="CartPole-v1", stop=StopConfig(env_steps=100_000))) as algorithm:
        result = algorithm.run()

`build` starts the processes, `step` is one training iteration, `run` repeats it until a stop criterion is met, `close`
stops everything. Only this class knows all roles; how sampling and learning alternate is in `schedules`.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import gymnasium
import torch

from tetherl import schedules
from tetherl.algorithms.ppo import PPOLearner
from tetherl.config import RunConfig
from tetherl.data.fragment import Fragment, Sample
from tetherl.data.queue import SampleQueue
from tetherl.errors import ConfigError, PlanError, RunError, TetherlError
from tetherl.models.policy import Policy
from tetherl.resources.measure import ProcessMeter
from tetherl.resources.plan import ResourcePlan
from tetherl.runs.directory import RunDirectory
from tetherl.spaces import space_from_spec
from tetherl.team import Team
from tetherl.tracking import Tracker
from tetherl.workers.envs import env_factory
from tetherl.workers.evaluator import EvaluationResult


class Callbacks:
    """User code hooks in here: override what you need and pass an instance to Algorithm."""

    def on_iteration(self, algorithm: Algorithm, metrics: dict[str, Any]) -> None:
        """After each training iteration; what is added to `metrics` is logged with them."""

    def on_episode_end(self, algorithm: Algorithm, episode_return: float, length: int) -> None:
        """After each finished training episode."""

    def on_wait(self, algorithm: Algorithm) -> None:
        """About once a second while a batch fills; keep it short."""


@dataclass
class RunResult:
    """How a run ended."""

    reason: str
    already_finished: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)


class Algorithm:
    """One training run. Construction is cheap; `build` (or entering the context) starts processes."""

    def __init__(self, config: RunConfig, callbacks: Callbacks | None = None) -> None:
        self.config = config.resolved()
        self.callbacks = callbacks or Callbacks()
        self.iteration = 0
        self.version = 0
        self.phase = "collecting"
        self.metrics: dict[str, Any] = {}
        self.resumed_from: str | None = None
        self._stop_reason: str | None = None
        self._learn_s: float | None = None  # how long the last learning took: what clients are told to expect
        self._timers: dict[str, float] = {}
        self._built = False
        self._schedule = schedules.rounds
        if self.config.external is not None:
            self._schedule = schedules.hold if self._during_learning == "hold" else schedules.play_on

    # ------------------------------------------------------------------ life cycle

    def build(self) -> Algorithm:
        """Check the plan, open the run directory (resuming if it holds a checkpoint), start the processes."""
        if self._built:
            return self
        config = self.config
        if config.learners.workers:
            raise ConfigError(
                f"learners.workers is {config.learners.workers}: this version learns in the algorithm process only; "
                "set learners.workers to 0 and give the algorithm process the CPUs and GPUs (algorithm.cpus, "
                "algorithm.gpus)"
            )
        self.observation_space, self.action_space = self._spaces()
        self.plan, self.machine = ResourcePlan.for_this_machine(config)
        if self.plan.problems:
            raise PlanError("this plan does not fit the machine:\n" + "\n".join(self.plan.problems))
        torch.set_num_threads(max(1, int(config.algorithm.cpus)))
        assert config.name is not None
        self.run_dir = RunDirectory.open(
            config.runs_dir,
            config.name,
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
            mode=config.checkpoint.mode,
        )
        self._built = True
        try:
            self._build_learner()
            self._resume()
            self.run_dir.write_config(config.to_dict())
            if self._stop_criterion() is None:
                self._start_processes()
        except BaseException:
            self.close()
            raise
        return self

    def _spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        external = self.config.external
        if external is not None:
            return space_from_spec(external.observation_space), space_from_spec(external.action_space)
        env = env_factory(self.config.env, self.config.env_config)()
        try:
            return env.observation_space, env.action_space
        finally:
            env.close()

    def _build_learner(self) -> None:
        config = self.config
        device = "cuda" if config.device == "cuda" or (config.device == "auto" and config.algorithm.gpus) else "cpu"
        self.policy = Policy(self.observation_space, self.action_space, config.model, seed=config.seed).to(device)
        self.learner = PPOLearner(
            self.policy,
            config.algorithm,
            max_seq_len=config.model.max_seq_len,
            seed=config.seed,
            device=device,
        )
        assert config.rollouts.queue_bytes is not None and config.algorithm.max_lag is not None
        self.queue = SampleQueue(config.rollouts.queue_bytes)
        self.tracker = Tracker(self.run_dir.events)

    def _start_processes(self) -> None:
        self.team = Team.start(self)
        self.rollouts = self.team.rollouts
        self.meter = ProcessMeter()
        self.meter.watch("algorithm", 0, os.getpid())
        for role, index, pid in self.team.pids():
            self.meter.watch(role, index, pid)
            self.run_dir.events.append("worker_started", role=role, index=index, pid=pid)
        self.publish_weights(first=True)
        self._started = time.monotonic()
        if self.config.external is not None:
            self.rollouts.start_serving()
            self.announce("collecting")
            self.run_dir.events.append("serving", url=self.team.url, workers=self.team.worker_urls)

    def close(self) -> None:
        """Tell the clients, stop all processes and release the run directory; close twice is fine."""
        if hasattr(self, "team"):
            if self.config.external is not None and self.phase != "stopped":
                # Clients that hear it end well; without it they would wait for a server to come back.
                with contextlib.suppress(TetherlError, TimeoutError):
                    self.announce("stopped")
            self.team.close()
        if hasattr(self, "run_dir"):
            self.run_dir.close()

    def __enter__(self) -> Algorithm:
        return self.build()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------ running

    def run(self) -> RunResult:
        """Train until a stop criterion is met or `request_stop` is called; checkpoints on the way and at the end."""
        self.build()
        reason = self._stop_criterion()
        if reason is not None:
            return RunResult(reason, already_finished=True, metrics=self.metrics)
        while (reason := self._stop_criterion()) is None:
            try:
                self.step()
            except _Stop:
                continue
            if self._checkpoint_due():
                self.save()
        if self.config.checkpoint.at_end and self._saved_iteration != self.iteration:
            self.save()
        self.run_dir.events.append("run_ended", reason=reason, iteration=self.iteration)
        return RunResult(reason, metrics=self.metrics)

    def step(self) -> dict[str, Any]:
        """One training iteration; returns its metrics."""
        self._timers = {"sample": 0.0, "learn": 0.0}
        self._schedule(self)
        self.iteration += 1
        self.team.evaluation.after_iteration(self.iteration, self._weights, self.version)
        self.metrics = self._collect_metrics()
        self.callbacks.on_iteration(self, self.metrics)
        self.run_dir.metrics.append(self.metrics)
        return self.metrics

    @property
    def url(self) -> str | None:
        """Address of the front door; None without external clients or before the start."""
        return self.team.url if hasattr(self, "team") else None

    def request_stop(self, reason: str) -> None:
        """End the run at the next safe point; may be called from a signal handler or another thread."""
        self._stop_reason = reason

    def evaluate(self, episodes: int, explore: bool = False) -> EvaluationResult:
        """Play `episodes` with the current policy, by the evaluation workers (or here when there are none)."""
        return self.team.evaluation.now(episodes, self._weights, self.version, explore=explore)

    # ------------------------------------------------------------------ what schedules are made of

    @property
    def _during_learning(self) -> str:
        return self.config.external.during_learning if self.config.external is not None else "keep"

    @property
    def _max_lag(self) -> int:
        assert self.config.algorithm.max_lag is not None
        return self.config.algorithm.max_lag

    @property
    def _batch_size(self) -> int:
        assert self.config.algorithm.train_batch_size is not None
        return self.config.algorithm.train_batch_size

    def collect_from_envs(self) -> None:
        """Sample from environments that tetherl steps until the batch is full; then they stand still."""
        started = time.perf_counter()
        rollouts = self.config.rollouts
        copies = max(1, rollouts.workers or 1) * (rollouts.envs_per_worker or 1)
        steps = min(rollouts.fragment_length, -(-self._batch_size // copies))
        self.rollouts.collect(self._batch_ready, steps)
        self._timers["sample"] += time.perf_counter() - started

    def wait_for_batch(self) -> None:
        """Wait until clients have filled a batch."""
        started = time.perf_counter()
        while not self._batch_ready(timeout=1.0):
            self.callbacks.on_wait(self)
        self._timers["sample"] += time.perf_counter() - started

    def _batch_ready(self, timeout: float = 0.0) -> bool:
        ready = self.queue.wait(self._batch_size, version=self.version, max_lag=self._max_lag, timeout=timeout)
        if ready < self._batch_size and self._stop_criterion() is not None:
            raise _Stop
        return ready >= self._batch_size

    def take_batch(self) -> list[Fragment]:
        """The oldest fragments that make up one batch."""
        return self.queue.take(self._batch_size, version=self.version, max_lag=self._max_lag)

    def take_all(self) -> list[Fragment]:
        """Everything that is in the queue."""
        return self.queue.take(None, version=self.version, max_lag=self._max_lag)

    def learn(self, batch: list[Fragment]) -> None:
        """Update the policy from `batch` and settle the books."""
        started = time.perf_counter()
        self._batch_by_worker = dict(self.queue.ledger.trained_by_worker)
        result = self.learner.update(batch, version=self.version, steps_trained=self.queue.ledger.trained)
        self.queue.settle(result.trained, result.dropped, version=self.version, max_lag=self._max_lag)
        for message in result.warnings:
            self.run_dir.events.append("warning", message=message)
        given = result.trained + sum(result.dropped.values())
        if result.trained < given / 2:
            self.run_dir.events.append(
                "warning",
                message=f"only {result.trained} of {given} steps of this batch could be trained on ({result.dropped}); "
                "if they are stale, learning takes long compared with playing: fewer epochs, larger batches, or "
                "during_learning: hold",
            )
        self._learn_metrics = result.metrics
        self._learn_s = time.perf_counter() - started
        self._timers["learn"] += self._learn_s

    def publish_weights(self, first: bool = False) -> None:
        """Hand the current weights to all rollout workers as a new policy version."""
        self.version += 0 if first else 1
        self._weights = self.team.engine.put(self.policy.weights())
        self.rollouts.broadcast("set_weights", self._weights, self.version)

    def announce(self, phase: str, cut: bool = False) -> None:
        """Tell all clients what the algorithm does now; with `cut`, open fragments end here."""
        self.phase = phase
        self.rollouts.broadcast("set_phase", phase, self._learn_s if phase == "learning" else None, cut=cut)

    def accept(self, sample: Sample) -> None:
        """Called for each sample that arrives, from whatever thread received it."""
        for episode in sample.episodes:
            self.callbacks.on_episode_end(self, episode.episode_return, episode.length)
        self.tracker.add(sample)

    # ------------------------------------------------------------------ metrics, stopping

    def _collect_metrics(self) -> dict[str, Any]:
        books = self.queue.snapshot()
        seconds = self._timers["sample"] + self._timers["learn"]
        before = self._batch_by_worker
        batch = {w: n - before.get(w, 0) for w, n in books["trained_by_worker"].items()}
        size = max(1, sum(batch.values()))
        metrics: dict[str, Any] = {
            "iteration": self.iteration,
            "env_steps": books["received"],
            **self.tracker.metrics(),
            "steps/received": books["received"],
            "steps/trained": books["trained"],
            **{f"steps/dropped/{reason}": n for reason, n in books["dropped"].items()},
            "steps/pending": books["pending"],
            "steps/received_while_learning": books["received_learning"],
            "time/sample_s": self._timers["sample"],
            "time/learn_s": self._timers["learn"],
            "time/total_s": self._seconds(),
            "env_steps_per_s": size / seconds if seconds > 0 else None,
            "policy_version": self.version,
            **self._learn_metrics,
            **{f"batch/share/{w}": n / size for w, n in sorted(batch.items())},
            "queue/bytes": self.queue.nbytes,
            "queue/peak_bytes": self.queue.peak_bytes,
            "queue/max_bytes": self.queue.max_bytes,
            **self.team.evaluation.metrics(),
            **self.meter.read(),
        }
        return metrics

    def _seconds(self) -> float:
        """Seconds of this run over all its resumes."""
        return self._past_s + (time.monotonic() - self._started if hasattr(self, "_started") else 0.0)

    def _stop_criterion(self) -> str | None:
        stop = self.config.stop
        if self._stop_reason is not None:
            return self._stop_reason
        if stop.iterations is not None and self.iteration >= stop.iterations:
            return f"stop.iterations: {self.iteration} of {stop.iterations}"
        received = self.queue.ledger.received
        if stop.env_steps is not None and received >= stop.env_steps:
            return f"stop.env_steps: {received} of {stop.env_steps}"
        if stop.time_s is not None and self._seconds() >= stop.time_s:
            return f"stop.time_s: {self._seconds():.0f} of {stop.time_s:.0f} seconds"
        mean = self.tracker.return_mean
        if stop.episode_return_mean is not None and self.tracker.full and mean >= stop.episode_return_mean:
            return f"stop.episode_return_mean: {mean:.1f} of {stop.episode_return_mean:.1f}"
        return None

    # ------------------------------------------------------------------ checkpoints

    def _checkpoint_due(self) -> bool:
        interval = self.config.checkpoint.interval_seconds
        if interval is not None:
            return time.monotonic() - self._saved_at >= interval
        every = self.config.checkpoint.interval
        return isinstance(every, int) and self.iteration % every == 0

    def save(self) -> str:
        """Write a checkpoint of this moment; returns its path."""
        arrays, learner = self.learner.state()
        state = {
            "iteration": self.iteration,
            "version": self.version,
            "seconds": self._seconds(),
            "learner": learner,
            "books": self.queue.snapshot()["state"],
            "tracker": self.tracker.state(),
            "metrics": {key: _finite(value) for key, value in self.metrics.items()},
            "config": self.config.to_dict(),
        }
        score = self.metrics.get(self.config.checkpoint.score)
        path = self.run_dir.checkpoints.save(self.iteration, arrays, state, score=score)
        self._saved_at, self._saved_iteration = time.monotonic(), self.iteration
        self.run_dir.events.append("checkpoint", iteration=self.iteration, path=str(path))
        return str(path)

    def _resume(self) -> None:
        self._past_s, self._saved_at, self._saved_iteration = 0.0, time.monotonic(), -1
        resume, run_dir = self.config.resume, self.run_dir
        if resume == "never" and run_dir.existed:
            raise RunError(
                f"run {self.config.name!r} exists already in {run_dir.path} and resume is 'never'; choose another "
                "name, or resume=auto to go on with it"
            )
        if run_dir.checkpoints.empty:
            if resume == "must":
                raise RunError(
                    f"run {self.config.name!r} has no checkpoint to resume in {run_dir.path} and resume is 'must'; "
                    "check name and runs_dir, or use resume=auto"
                )
            run_dir.metrics.truncate_after(0)
            return
        reached = max((line.get("iteration", 0) for line in run_dir.metrics.read()), default=0)
        checkpoint = run_dir.checkpoints.load("latest")
        state = checkpoint.state
        self.learner.load_state(checkpoint.arrays, state["learner"])
        self.iteration, self.version = int(state["iteration"]), int(state["version"])
        self._past_s = float(state["seconds"])
        self.queue.ledger.restore(state["books"])
        self.tracker.restore(state["tracker"])
        self.metrics = dict(state["metrics"])
        run_dir.metrics.truncate_after(self.iteration)
        run_dir.checkpoints.truncate_after(self.iteration)
        self.resumed_from = str(checkpoint.path)
        run_dir.events.append(
            "resumed",
            path=self.resumed_from,
            iteration=self.iteration,
            iterations_lost=max(0, reached - self.iteration),
        )


def _finite(value: Any) -> Any:
    """A number that JSON cannot hold becomes None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Stop(Exception):
    """A stop criterion was met while a batch was filling."""
