"""The resource plan: which processes a run has, what each gets, and why.

`ResourcePlan.from_config` is pure: it reads a configuration and starts, detects and imports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tetherl.errors import ConfigError
from tetherl.resources.fit import SECTIONS, Placement, fit
from tetherl.resources.machine import Machine
from tetherl.resources.rules import gpus_asked, rollout_workers, setting_problems

PROCESS_BYTES = 300 * 2**20
"""What a process needs before it holds any experience: interpreter, torch, libraries."""

MIN_BUFFER_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """The processes of one role. `cpus`, `gpus`, `model_copies` and `memory_max` are for each of them.

    Example: role "rollout", count 2, cpus 2.0, gpus 0.25, device "cuda", model_copies 1,
    memory_max 1_236_000_000, what "hosts a policy server ...", why "rollouts.workers is 2: ...".
    """

    role: str
    count: int
    cpus: float
    gpus: float
    what: str
    why: str
    device: str
    model_copies: int
    memory_max: int | None

    @property
    def total_cpus(self) -> float:
        return round(self.count * self.cpus, 6)

    @property
    def total_gpus(self) -> float:
        return round(self.count * self.gpus, 6)


class Total(NamedTuple):
    """Sums over all processes of a plan."""

    cpus: float
    gpus: float
    memory_max: int | None


@dataclass(frozen=True, kw_only=True)
class ResourcePlan:
    """All rows; with `on(machine)` also whether they fit, and which process gets which GPU."""

    rows: tuple[PlanRow, ...]
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    machine: Machine | None = None
    placement: Placement = ()

    @property
    def total(self) -> Total:
        """The sums over all processes; memory_max is None when the size of a step is not known."""
        bounds = [row.memory_max for row in self.rows]
        return Total(
            cpus=round(sum(row.total_cpus for row in self.rows), 6),
            gpus=round(sum(row.total_gpus for row in self.rows), 6),
            memory_max=None if None in bounds else sum(row.count * (row.memory_max or 0) for row in self.rows),
        )

    @property
    def fits(self) -> bool:
        """False when the plan was checked against a machine and does not fit."""
        return not self.problems

    def row(self, role: str) -> PlanRow | None:
        """The row of a role, or None when the run has no such process."""
        return next((row for row in self.rows if row.role == role), None)

    @classmethod
    def from_config(cls, config: Any, row_bytes: int | None = None) -> ResourcePlan:
        """The plan of a RunConfig (or anything with the same attributes).

        row_bytes: bytes of one env step in memory; without it `memory_max` is None. Raises ConfigError for
        settings that would do nothing and for GPU numbers that no machine can give.
        """
        problems = setting_problems(config)
        if problems:
            raise ConfigError("\n".join(problems))
        rows = _Rows(config, row_bytes).all()
        return cls(rows=rows, warnings=tuple(_remarks(config, rows)))

    def on(self, machine: Machine, user_set_cpus: bool = False) -> ResourcePlan:
        """The same plan, checked against a machine; with user_set_cpus too few CPUs are a problem."""
        result = fit(self.rows, machine, user_set_cpus)
        return ResourcePlan(
            rows=self.rows,
            warnings=(*self.warnings, *result.warnings),
            problems=result.problems,
            machine=machine,
            placement=result.placement,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values: what `tetherl plan --json` prints."""
        from tetherl.resources.explain import document

        return document(self)

    @classmethod
    def for_this_machine(cls, config: Any) -> tuple[ResourcePlan, Machine]:
        """The plan checked against this machine, as detected or as set in the `machine` section."""
        machine = Machine.detect().limited(config.machine)
        plan = cls.from_config(config, row_bytes=config.row_bytes())
        return plan.on(machine, user_set_cpus=config.machine.cpus is not None), machine


def _remarks(config: Any, rows: Sequence[PlanRow]) -> list[str]:
    remarks = []
    asked = gpus_asked(config)
    if config.device == "cpu" and asked:
        remarks.append(f"device is cpu: the {asked:g} GPUs that the configuration gives are not used")
    for row in rows:
        if row.gpus > 1:
            remarks.append(f"{row.role}: a process computes on one GPU; {row.gpus:g} are reserved for each")
    if getattr(config, "engine", "local") == "inline" and len(rows) > 1:
        remarks.append("engine is inline: all roles run in one process, one after the other")
    return remarks


def longest_fragment(config: Any, horizon: int | None = None) -> int:
    """Steps of the longest fragment: with complete_episodes that of the longest episode allowed.

    horizon: the environment's own limit, where there is one.
    """
    if config.rollouts.batch_mode != "complete_episodes":
        return int(config.rollouts.fragment_length)
    limit = config.external.max_episode_steps if config.external is not None else horizon
    return int(limit or config.algorithm.train_batch_size or 0)


def serving_bytes(config: Any, row_bytes: int) -> tuple[int, int]:
    """Bytes that a policy server may hold: (in open episodes, in fragments that nobody has taken yet)."""
    longest = longest_fragment(config) * row_bytes
    open_episodes = 2 if config.rollouts.batch_mode == "complete_episodes" else 32
    return max(MIN_BUFFER_BYTES, open_episodes * longest), max(MIN_BUFFER_BYTES, longest)


class _Rows:
    """Builds the rows of one configuration."""

    def __init__(self, config: Any, row_bytes: int | None) -> None:
        self.config = config
        self.row_bytes = row_bytes
        self.rollouts = rollout_workers(config)
        self.learners = int(config.learners.workers)
        self.interval = config.evaluation.interval
        self.evaluators = int(config.evaluation.workers) if self.interval is not None else 0
        self.external = config.external is not None

    def all(self) -> tuple[PlanRow, ...]:
        rows = [self.algorithm()]
        if self.rollouts:
            rows.append(self.rollout())
        if self.learners:
            rows.append(self.learner())
        if self.evaluators:
            rows.append(self.evaluation())
        return tuple(rows)

    def algorithm(self) -> PlanRow:
        tasks = ["assembles batches", "steers learning and checkpoints"]
        because = ["every run has one"]
        copies = 0
        if not self.learners:
            tasks.append("computes the gradients")
            because.append("it learns, because learners.workers is 0")
            copies += 1
        if not self.rollouts:
            tasks.append("hosts the policy server" if self.external else "steps the environments")
            because.append("it samples, because rollouts.workers is 0")
            copies += 1
        if self.interval is not None and not self.evaluators:
            tasks.append("plays the evaluation episodes")
            because.append("it evaluates, because evaluation.workers is 0")
            copies += 1
        section = self.config.algorithm
        batch = self._steps_bytes(section.train_batch_size)
        # One batch is assembled; the one who learns holds it once more, prepared for the optimizer.
        held = self._sum(self._queue_bytes(), batch, 0 if self.learners else batch)
        why = "; ".join(because) + ". " + self._numbers(section.cpus, section.gpus, "algorithm.cpus", "algorithm.gpus")
        return self._row("algorithm", 1, section.cpus, section.gpus, tasks, why, copies, held)

    def rollout(self) -> PlanRow:
        section = self.config.rollouts
        if self.external:
            tasks = [
                "hosts a policy server for clients",
                "chooses their actions",
                "cuts their steps into fragments",
            ]
            because = "so that clients get their actions while the algorithm process learns"
            held = None if self.row_bytes is None else sum(serving_bytes(self.config, self.row_bytes))
        else:
            copies = section.envs_per_worker or 1
            tasks = [f"steps {copies} environment cop{'y' if copies == 1 else 'ies'}", "chooses the actions"]
            because = "so that environments are stepped side by side, outside the algorithm process"
            held = self._steps_bytes(copies * longest_fragment(self.config))
        return self._workers("rollout", self.rollouts, section, tasks, because, held)

    def learner(self) -> PlanRow:
        tasks = ["computes the gradients"]
        because = "so that the algorithm process does not learn itself"
        if self.learners > 1:
            tasks = [
                f"computes the gradients of 1/{self.learners} of each minibatch",
                "averages with the others",
            ]
            because = "so that each batch is learned from by several processes at once"
        # Each receives the whole batch and holds it once more, prepared; it computes its share of each minibatch.
        batch = self._steps_bytes(self.config.algorithm.train_batch_size)
        held = self._sum(batch, batch)
        return self._workers("learner", self.learners, self.config.learners, tasks, because, held)

    def evaluation(self) -> PlanRow:
        tasks = [f"plays its part of {self.config.evaluation.episodes} episodes every {self.interval} iterations"]
        because = "so that evaluation does not hold up training; its steps are never trained on"
        return self._workers("evaluation", self.evaluators, self.config.evaluation, tasks, because, 0)

    def _workers(
        self, role: str, count: int, section: Any, tasks: list[str], because: str, held: int | None
    ) -> PlanRow:
        name = SECTIONS[role]
        cpus, gpus = section.cpus_per_worker, section.gpus_per_worker
        given = self._numbers(cpus, gpus, f"{name}.cpus_per_worker", f"{name}.gpus_per_worker")
        start = f"{name}.workers is {count}"
        if role == "rollout" and self.config.rollouts.workers is None:
            start += " (the default with external)"
        return self._row(role, count, cpus, gpus, tasks, f"{start}: {because}. {given}", 1, held)

    def _row(
        self,
        role: str,
        count: int,
        cpus: float,
        gpus: float,
        tasks: list[str],
        why: str,
        copies: int,
        held: int | None,
    ) -> PlanRow:
        gpus = 0.0 if self.config.device == "cpu" else float(gpus)
        return PlanRow(
            role=role,
            count=count,
            cpus=float(cpus),
            gpus=gpus,
            what=", ".join(tasks),
            why=why,
            device="cuda" if gpus else "cpu",
            model_copies=copies,
            memory_max=None if held is None else PROCESS_BYTES + held,
        )

    def _numbers(self, cpus: float, gpus: float, cpu_key: str, gpu_key: str) -> str:
        each = "" if cpu_key == "algorithm.cpus" else " each"
        text = f"{cpus:g} CPU{'s' if cpus != 1 else ''}{each} from {cpu_key}"
        if gpus and self.config.device == "cpu":
            return f"{text}; no GPU because device is cpu"
        return f"{text}, {gpus:g} GPU{'s' if gpus > 1 else ''}{each} from {gpu_key}" if gpus else text

    def _steps_bytes(self, steps: int | None) -> int | None:
        return None if steps is None or self.row_bytes is None else steps * self.row_bytes

    def _queue_bytes(self) -> int | None:
        given: int | None = self.config.rollouts.queue_bytes
        size = self.config.algorithm.train_batch_size
        return given if given is not None else self._steps_bytes(None if size is None else 2 * size)

    @staticmethod
    def _sum(*parts: int | None) -> int | None:
        return None if None in parts else sum(part or 0 for part in parts)
