"""The driver of a run: assembles batches, steers learning, evaluation and checkpoints. The file to read first.

    with Algorithm(RunConfig(env="CartPole-v1", stop=StopConfig(env_steps=100_000))) as algorithm:
        result = algorithm.run()

`build` starts the processes, `step` is one training iteration, `run` repeats it until a stop criterion is met, `close`
stops everything. Only this class knows all roles; how sampling and learning alternate is in `schedules`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import time
from collections import deque
from types import TracebackType
from typing import Any

import gymnasium

from tetherl import persistence, schedules
from tetherl.algorithms.ppo import PPOLearner
from tetherl.callbacks import Callbacks, RunResult
from tetherl.config import RunConfig
from tetherl.data.fragment import Fragment, Sample
from tetherl.data.queue import SampleQueue
from tetherl.errors import ActorDiedError, ConfigError, EngineError, PlanError, TetherlError
from tetherl.models.numerics import set_up_torch
from tetherl.models.policy import Policy
from tetherl.resources.measure import ProcessMeter
from tetherl.resources.plan import ResourcePlan
from tetherl.runs.directory import RunDirectory
from tetherl.server.listen import check_exposure, load_token
from tetherl.spaces import space_from_spec
from tetherl.team import Team
from tetherl.tracking import Tracker, iteration_metrics, plain
from tetherl.workers.envs import env_factory
from tetherl.workers.evaluator import EvaluationResult
from tetherl.workers.group import CALL_TIMEOUT_S
from tetherl.workers.learner import LearnerGroup

GOODBYE_TIMEOUT_S = 5.0
"""A worker that hangs must not keep a run from ending."""

EVALUATION_TIMEOUT_S = 300.0
"""Longest wait for the last evaluation when a run ends."""


class Algorithm:
    """One training run. Construction is cheap; `build` (or entering the context) starts processes."""

    def __init__(self, config: RunConfig, callbacks: Callbacks | None = None, *, weights_lag: int = 0) -> None:
        """`weights_lag`: see `publish_weights`; for tests and benchmarks."""
        self.config = config.resolved()
        if weights_lag > self._max_lag:
            raise ConfigError(
                f"weights_lag {weights_lag}: algorithm.max_lag is {self._max_lag}; nothing could be trained"
            )
        self.callbacks = callbacks or Callbacks()
        self.iteration = 0
        self.version = 0
        self.phase = "collecting"
        self.metrics: dict[str, Any] = {}
        self.last_evaluation: float | None = None
        self.resumed: persistence.Resumed | None = None
        self.past_seconds = 0.0  # of earlier starts of this run
        self._saved_at, self._saved_iteration = time.monotonic(), -1
        self._stop_reason: str | None = None
        self._published: deque[tuple[Any, int]] = deque(maxlen=weights_lag + 1)  # weights and their version
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
        self.observation_space, self.action_space = self._spaces()
        self.plan, self.machine = ResourcePlan.for_this_machine(config)
        if self.plan.problems:
            raise PlanError("this plan does not fit the machine:\n" + "\n".join(self.plan.problems))
        if config.external is not None:
            external = config.external
            check_exposure(external.address, load_token(external), external.allow_open)
        assert config.name is not None
        persistence.check_resume(config)
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
            self.resumed = persistence.resume(self)
            if self._stop_criterion() is None:  # a finished run is left as it is
                self._tell_resume()
                self.run_dir.write_config(config.to_dict())
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
        on_gpu = config.device == "cuda" or (config.device == "auto" and config.algorithm.gpus)
        device = "cuda" if on_gpu and not config.learners.workers else "cpu"
        set_up_torch(max(1, int(config.algorithm.cpus)), device)
        self.policy = Policy(self.observation_space, self.action_space, config.model, seed=config.seed).to(device)
        self.learner: PPOLearner | LearnerGroup = PPOLearner(
            self.policy,
            config.algorithm,
            max_seq_len=config.model.max_seq_len,
            seed=config.seed,
            device=device,
        )
        assert config.rollouts.queue_bytes is not None and config.algorithm.max_lag is not None
        self.queue = SampleQueue(config.rollouts.queue_bytes)
        self.tracker = Tracker()

    def _start_processes(self) -> None:
        self.team = Team.start(self)
        self.rollouts = self.team.rollouts
        if self.team.learners is not None:
            self.learner = self.team.learners  # what was built or resumed here is where they have started from
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
        with contextlib.ExitStack() as stack:  # runs from the last to the first, whatever goes wrong on the way
            if hasattr(self, "run_dir"):
                stack.callback(self.run_dir.close)
            if hasattr(self, "team"):
                stack.callback(self.team.close)
                if self.config.external is not None and self.phase != "stopped":
                    # Clients that hear it end well; without it they would wait for a server to come back.
                    stack.callback(self._say_goodbye)

    def _say_goodbye(self) -> None:
        with contextlib.suppress(TetherlError):
            self.announce("stopped", timeout=GOODBYE_TIMEOUT_S)

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
        try:
            while (reason := self._stop_reason or self._stop_criterion()) is None:
                if self.step() is not None and self._checkpoint_due():
                    self.save()
        except EngineError as error:
            self._end_by_failure(error)
            raise
        if self._stop_reason is None:
            self._finish_evaluation()
        if self.config.checkpoint.at_end and self._saved_iteration != self.iteration:
            self.save()
        self.run_dir.events.append("run_ended", reason=reason, iteration=self.iteration)
        return RunResult(reason, metrics=self.metrics)

    def step(self) -> dict[str, Any] | None:
        """One training iteration; returns its metrics, or None if the run is to stop before a batch was full."""
        self._timers = {"sample": 0.0, "learn": 0.0}
        try:
            self._schedule(self)
        except _Stop:
            return None
        self.iteration += 1
        self.team.evaluation.after_iteration(self.iteration, self._weights, self.version)
        self.metrics = iteration_metrics(self, self._batch_by_worker, self._learn_metrics, **self._timers)
        self.last_evaluation = self.metrics.get("evaluation/episode_return_mean", self.last_evaluation)
        self.callbacks.on_iteration(self, self.metrics)
        self.metrics = {key: plain(value) for key, value in self.metrics.items()}
        self.run_dir.log(self.metrics)
        return self.metrics

    def _end_by_failure(self, error: EngineError) -> None:
        """A worker died or failed: what was learned until now is kept, and the run's events say what happened."""
        reason = str(error).partition("\n")[0]
        kind = "worker_died" if isinstance(error, ActorDiedError) else "worker_failed"
        self.run_dir.events.append(kind, message=reason)
        if self.config.checkpoint.at_end and self._saved_iteration != self.iteration:
            with contextlib.suppress(TetherlError):  # a learner worker that is gone cannot give its state
                self.save()
        self.run_dir.events.append("run_ended", reason=reason, iteration=self.iteration)

    def _finish_evaluation(self) -> None:
        """An evaluation that was started is part of the last iteration's metrics."""
        self.team.evaluation.finish(EVALUATION_TIMEOUT_S)
        found = self.team.evaluation.metrics()
        if found and self.metrics:
            self.metrics.update(found)
            self.run_dir.metrics.truncate_after(self.iteration - 1)
            self.run_dir.log(self.metrics)

    @property
    def url(self) -> str | None:
        """Address of the front door; None without external clients or before the start."""
        return self.team.url if hasattr(self, "team") else None

    @property
    def running(self) -> bool:
        """False before the start, and for a run that was finished already."""
        return hasattr(self, "team")

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
        if ready >= self._batch_size:
            return True
        if self._stop_reason is not None or self._stop_criterion() is not None:
            raise _Stop
        if ready and self.queue.overflowed:
            # The queue is full of steps that cannot be trained on: waiting would only lose more of them.
            self.warn(
                f"the sample queue is full ({self.queue.max_bytes} bytes) with {ready} steps to train on, a "
                f"batch has {self._batch_size}: this batch is smaller. Raise rollouts.queue_bytes, or let the policy "
                "choose more of the actions",
            )
            return True
        return False

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
            self.warn(message)
        self._learn_metrics = result.metrics
        self._learn_s = time.perf_counter() - started
        self._timers["learn"] += self._learn_s

    def publish_weights(self, first: bool = False) -> None:
        """Hand the current weights to all rollout workers as a new policy version.

        Testing hook: with `weights_lag` L they get the weights of L versions ago, under those weights' own number,
        so that every step comes at least L versions late (`algorithm.max_lag` must allow it).
        """
        self.version += 0 if first else 1
        self._weights = self.team.engine.put(self.policy.weights())
        self._published.append((self._weights, self.version))
        self.rollouts.broadcast("set_weights", *self._published[0])

    def announce(self, phase: str, cut: bool = False, timeout: float = CALL_TIMEOUT_S) -> None:
        """Tell all clients what the algorithm does now; with `cut`, open fragments end here."""
        self.phase = phase
        expected = self._learn_s if phase == "learning" else None
        self.rollouts.broadcast("set_phase", phase, expected, cut=cut, timeout=timeout)

    def accept(self, sample: Sample) -> None:
        """Called for each sample that arrives, from whatever thread received it."""
        for episode in sample.episodes:
            self.callbacks.on_episode_end(self, episode.episode_return, episode.length)
        self.tracker.add(sample)
        for event in sample.events:
            fields = {key: value for key, value in event.items() if key != "kind"}
            if event["kind"] == "warning":
                self.callbacks.on_warning(self, str(event["message"]))
            self.run_dir.events.append(event["kind"], **fields)

    # ------------------------------------------------------------------ metrics, stopping

    @property
    def seconds(self) -> float:
        """Seconds of this run over all its resumes."""
        return self.past_seconds + (time.monotonic() - self._started if hasattr(self, "_started") else 0.0)

    def _stop_criterion(self) -> str | None:
        stop = self.config.stop
        if stop.iterations is not None and self.iteration >= stop.iterations:
            return f"stop.iterations: {self.iteration} of {stop.iterations}"
        received = self.queue.received
        if stop.env_steps is not None and received >= stop.env_steps:
            return f"stop.env_steps: {received} of {stop.env_steps}"
        if stop.time_s is not None and self.seconds >= stop.time_s:
            return f"stop.time_s: {self.seconds:.0f} of {stop.time_s:.0f} seconds"
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
        arrays, state = persistence.state_of(self)
        score = self.metrics.get(self.config.checkpoint.score)
        if score is None and self.config.checkpoint.score not in self.metrics and self.metrics:
            near = difflib.get_close_matches(self.config.checkpoint.score, self.metrics, n=3)
            self.warn(
                f"checkpoint.score is {self.config.checkpoint.score!r}: the last iteration has no such metric, so this "
                f"checkpoint is never the best one. Near: {', '.join(near) or 'none'}"
            )
        path = self.run_dir.checkpoints.save(self.iteration, arrays, state, score=score)
        self._saved_at, self._saved_iteration = time.monotonic(), self.iteration
        self.run_dir.events.append("checkpoint", iteration=self.iteration, path=str(path))
        return str(path)

    def warn(self, message: str) -> None:
        """Something that the user should know: into the run's events, and to the callbacks."""
        self.run_dir.events.append("warning", message=message)
        self.callbacks.on_warning(self, message)

    def _tell_resume(self) -> None:
        if self.resumed is not None:
            self.run_dir.events.append(
                "resumed",
                path=str(self.resumed.path),
                iteration=self.resumed.iteration,
                iterations_lost=self.resumed.iterations_lost,
                changed=list(self.resumed.changed),
            )


class _Stop(Exception):
    """A stop criterion was met while a batch was filling."""
