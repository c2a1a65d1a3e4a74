"""Runs that are repeated with several seeds: some at once, each result kept, so that a rerun only fills the gaps."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

from tetherl.algorithm import Algorithm
from tetherl.workers.evaluator import Evaluator
from tetherl.workers.spec import WorkerSpec

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
EPISODES = 20
"""Episodes of one evaluation, the number that acceptance tests use."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run. settings: everything that decides its result, besides the seed; JSON-able."""

    name: str
    seed: int
    settings: dict[str, Any]
    directory: Path

    @property
    def key(self) -> str:
        return f"{self.name}/{self.seed}"

    @property
    def fingerprint(self) -> str:
        """Short hash of the settings: other settings, other run."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def run_name(self) -> str:
        return f"{self.name}-{self.seed}-{self.fingerprint}"


class Results:
    """Finished runs in one JSON file: {"NAME/SEED": {"fingerprint": ..., ...}}; results of other settings are void."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._all: dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, job: Job) -> Result | None:
        found = self._all.get(job.key)
        return found if found is not None and found["fingerprint"] == job.fingerprint else None

    def of(self, name: str, job: Callable[[str, int, Path], Job]) -> list[Result]:
        """All valid results of `name`, by seed, each with its "seed"."""
        found = []
        for seed in sorted(int(key.rpartition("/")[2]) for key in self._all if key.rpartition("/")[0] == name):
            result = self.get(job(name, seed, self._path.parent))
            if result is not None:
                found.append({"seed": seed, **result})
        return found

    def put(self, job: Job, result: Result) -> None:
        self._all[job.key] = {"fingerprint": job.fingerprint, **result}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(".new")
        aside.write_text(json.dumps(self._all, indent=1) + "\n")
        os.replace(aside, self._path)


def fill(jobs: Sequence[Job], results: Results, work: Callable[[Job], Result], workers: int) -> list[str]:
    """Run the jobs that have no result yet, each in a fresh process; returns what failed, one line each."""
    missing = [job for job in jobs if results.get(job) is None]
    failures: list[str] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(work, job): job for job in missing}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                job = futures[future]
                try:
                    results.put(job, future.result())
                    common.say(f"{job.key}: done, {number} of {len(missing)}")
                except Exception as error:  # the other runs go on
                    failures.append(f"{job.key}: {type(error).__name__}: {error}")
                    common.say(failures[-1])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def evaluate(algorithm: Algorithm, *, explore: bool) -> list[float]:
    """Returns of EPISODES episodes with the trained policy, in the evaluation environment or the run's own."""
    config = algorithm.config
    evaluator = Evaluator(
        WorkerSpec(
            index=1,
            seed=config.seed,
            model=config.model,
            env=config.evaluation.env or config.env,
            env_config=config.env_config,
            envs=8,
        )
    )
    evaluator.set_weights(algorithm.policy.weights(), algorithm.version)
    try:
        return evaluator.evaluate(EPISODES, explore).returns
    finally:
        evaluator.close()


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def parser(description: str, names: Sequence[str], directory: str) -> argparse.ArgumentParser:
    """The options of both scripts."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--only", metavar="NAME", nargs="+", choices=names, help=f"of: {', '.join(names)}")
    options.add_argument("--seeds", metavar="S", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    options.add_argument("--workers", type=int, default=2, help="runs at the same time (default: 2)")
    options.add_argument("--dir", type=Path, default=ROOT / directory, help=f"runs and results (default: {directory})")
    options.add_argument("--json", action="store_true", help="one JSON document on stdout, all else on stderr")
    options.add_argument(
        "--write", nargs="?", const=PAGE, type=Path, metavar="FILE", help=f"update the table in FILE ({PAGE.name})"
    )
    return options


def report(name: str, options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    """Print the table or the document, and update the page if asked to."""
    if options.write is not None:
        common.write_block(options.write, name, text)
        common.say(f"updated {options.write}")
    print(json.dumps(document) if options.json else text)


def machine_text(results: Sequence[Result]) -> str:
    """One sentence on when and where."""
    dates = sorted({r["date"] for r in results})
    m = common.machine()
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"Taken {when} on {m['cpus']} cores ({m['cpu']}) that other programs used as well; Python {m['python']}, "
        f"torch {m['torch']}, gymnasium {m['gymnasium']}."
    )
