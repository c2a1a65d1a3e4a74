"""Trains environments with published results, three seeds each, and compares.

    python benchmarks/anchors.py [--only NAME ...] [--seeds 0 1 2] [--workers 2] [--json] [--write]

An anchor is passed when two of three seeds reach its threshold: the mean return of 20 greedy episodes after the
training that its file in `examples/anchors` describes. Results are kept in `runs/anchors/results.json`: a rerun does
only what is missing or has other settings; an interrupted run goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import common
import seeds
import yaml
from seeds import ROOT, Job, Result, Results, mean

from tetherl.algorithm import Algorithm, Callbacks
from tetherl.config import RunConfig

FILES = ROOT / "examples" / "anchors"
REPORT_EVERY_S = 30.0


@dataclass(frozen=True)
class Anchor:
    """least, most: what the greedy score must reach, or must not exceed. lag: versions that the policy is late."""

    title: str
    published: str
    least: float | None = None
    most: float | None = None
    lag: int = 0

    @property
    def required(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"

    def reached(self, score: float) -> bool:
        return score >= self.least if self.least is not None else self.most is not None and score <= self.most


ANCHORS = {
    "cartpole": Anchor("CartPole-v1", "500 ± 0 at 100k (RL Zoo)", least=475),
    "acrobot": Anchor("Acrobot-v1", "−73.5 ± 18.2 at 1M (RL Zoo), −86.4 ± 1.3 at 500k (CleanRL)", least=-100),
    "pendulum": Anchor("Pendulum-v1", "−172 ± 104 at 100k with gSDE (RL Zoo); criterion −300 (RLlib)", least=-300),
    "cartpole_no_velocity": Anchor("CartPole without velocities, LSTM", "500 ± 0 at 100k (RL Zoo)", least=450),
    "cartpole_no_velocity_feed_forward": Anchor(
        "the same without memory (must fail)",
        "46 (this project's reference)",
        most=100,
    ),
    "minigrid_empty": Anchor("MiniGrid-Empty-Random-5x5", ".968 at 100k (RL Zoo)", least=0.90),
    "minigrid_doorkey": Anchor("MiniGrid-DoorKey-5x5", ".964 at 100k (RL Zoo)", least=0.90),
    "repeat_after_me": Anchor("RepeatAfterMe (2 steps ago, best 100), LSTM", "criterion 50 at 100k (RLlib)", least=50),
    "cartpole_external": Anchor(
        "CartPole-v1, external clients, policy 4 versions late", "500 in process (this project's reference)", 450, lag=4
    ),
}


def path_of(name: str) -> str:
    """The anchor's configuration, relative to the repository."""
    return f"examples/anchors/{name}.yaml"


def command(name: str, seed: str = "S") -> str:
    if ANCHORS[name].lag:
        return f"python benchmarks/anchors.py --only {name} --seeds {seed}"
    return f"tetherl train {path_of(name)} seed={seed}"


def job(name: str, seed: int, directory: Path) -> Job:
    settings = yaml.safe_load((ROOT / path_of(name)).read_text())
    return Job(name, seed, {"file": settings, "lag": ANCHORS[name].lag}, directory)


def train(job: Job) -> Result:
    """One run and its evaluation."""
    settings = job.settings["file"] | {"name": job.run_name, "runs_dir": str(job.directory), "seed": job.seed}
    if "external" in settings:
        settings["external"] = settings["external"] | {"port": 0, "worker_port": 0}
    watch = Watch(job.key)
    algorithm = Algorithm(RunConfig.from_dict(settings), watch, weights_lag=job.settings["lag"])
    with algorithm, clients(algorithm, job.seed):
        metrics = algorithm.run().metrics
        greedy, sampled = (seeds.evaluate(algorithm, explore=explore) for explore in (False, True))
    return {
        "date": date.today().isoformat(),
        "greedy": greedy,
        "sampled": sampled,
        "training": metrics["episode_return_mean"],
        "env_steps": metrics["env_steps"],
        "wall_s": metrics["time/total_s"],
        "lag_mean": mean(watch.lags or [0.0]),
        "stale": metrics.get("steps/dropped/stale", 0),
    }


@contextlib.contextmanager
def clients(algorithm: Algorithm, seed: int) -> Iterator[None]:
    """The games of an external run: eight, in one process."""
    if algorithm.url is None:
        yield
        return
    words = [sys.executable, "-m", "tetherl", "client", "--env", "CartPole-v1", "--connect", algorithm.url]
    process = subprocess.Popen([*words, "--envs", "8", "--seed", str(1000 * seed), "--quiet"], stdout=sys.stderr)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


class Watch(Callbacks):
    """Says how it goes now and then; keeps the mean lag of each iteration."""

    def __init__(self, name: str) -> None:
        self._name, self._next = name, time.monotonic() + REPORT_EVERY_S
        self.lags: list[float] = []

    def on_iteration(self, algorithm: Algorithm, metrics: dict[str, Any]) -> None:
        self.lags.append(metrics.get("lag/mean", 0.0))
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_EVERY_S
            average = metrics["episode_return_mean"]
            said = "-" if average is None else f"{average:.1f}"
            common.say(f"{self._name}: {metrics['env_steps']} steps, {metrics['time/total_s']:.0f} s, return {said}")


def verdict(anchor: Anchor, found: Sequence[Result]) -> str:
    passed = sum(anchor.reached(mean(r["greedy"])) for r in found)
    if len(found) < 3:
        return f"{passed} of {len(found)} run"
    return f"{'passed' if passed >= 2 else 'missed'}, {passed} of {len(found)}"


def table(document: dict[str, Any]) -> str:
    """Published and own results, one line per anchor; a seed's cell is its greedy score (its training score)."""
    numbers = sorted({r["seed"] for found in document["anchors"].values() for r in found})
    header = ["environment", "published", "required", *(f"seed {s}" for s in numbers), "env steps", "wall time, s"]
    rows, commands = [], []
    for name, found in document["anchors"].items():
        if not found:
            continue
        anchor, by_seed = ANCHORS[name], {r["seed"]: r for r in found}
        cells = [score_text(by_seed[s]) if s in by_seed else "–" for s in numbers]
        walls = sorted(r["wall_s"] for r in found)
        wall = f"{walls[0]:.0f}" if len(walls) == 1 else f"{walls[0]:.0f} – {walls[-1]:.0f}"
        steps = f"{max(r['env_steps'] for r in found):,}"
        rows.append([anchor.title, anchor.published, anchor.required, *cells, steps, wall, verdict(anchor, found)])
        commands.append(f"* {anchor.title}: `{command(name)}`")
    return "\n".join(
        [
            common.table([*header, "verdict"], rows),
            "",
            f"A seed's result is the mean return of {seeds.EPISODES} greedy episodes after training; in brackets the "
            "same with sampled actions, and the mean of the last 100 training episodes.",
            *(
                late_text(ANCHORS[name], found)
                for name, found in document["anchors"].items()
                if found and ANCHORS[name].lag
            ),
            seeds.machine_text([r for found in document["anchors"].values() for r in found]),
            "",
            *commands,
        ]
    )


def late_text(anchor: Anchor, found: Sequence[Result]) -> str:
    """What became of steps that came late on purpose, and later still because the games play on while learning."""
    lags = ", ".join(f"{r['lag_mean']:.1f}" for r in found)
    stale = ", ".join(f"{100 * r['stale'] / r['env_steps']:.0f} %" for r in found)
    return f"{anchor.title}: mean lag of the trained steps {lags}; {stale} of the steps were too late to be trained on."


def score_text(result: Result) -> str:
    digits = 3 if abs(mean(result["greedy"])) <= 1 else 1
    numbers = [mean(result["greedy"]), mean(result["sampled"]), result["training"]]
    greedy, sampled, training = (f"{n:.{digits}f}".replace("-", "−") for n in numbers)
    return f"{greedy} ({sampled}, {training})"


def main() -> int:
    options = seeds.parser("Trains environments with published results.", list(ANCHORS), "runs/anchors").parse_args()
    names = options.only or list(ANCHORS)
    results = Results(options.dir / "results.json")
    jobs = [job(name, seed, options.dir) for name in names for seed in options.seeds]
    failures = seeds.fill(jobs, results, train, options.workers)
    # The table shows everything there is, also of earlier calls.
    found = {name: results.of(name, job) for name in ANCHORS}
    document = {"benchmark": "anchors", "anchors": found, "failures": failures}
    if any(found.values()):
        seeds.report("anchors", options, document, table(document))
    missed = [n for n in names if len(found[n]) >= 3 and "missed" in verdict(ANCHORS[n], found[n])]
    for name in missed:
        common.say(f"{name}: missed")
    return 1 if failures or missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        common.say("interrupted")
        sys.exit(130)
