"""How the policy losses cope with old experience, three seeds each.

    python benchmarks/lag.py [--only NAME ...] [--seeds 0 1 2] [--workers 2] [--json] [--write]

The policy that acts is L versions older than the one that learns, so each row is L updates old when it is trained on
(after the first L updates). CartPole-v1 (60,000 steps, a version each 512 of them) at L = 0, 4 and 16; Pendulum-v1
(80,000 steps) at L = 0 and 8. At L = 0 lag-scaled and decoupled PPO are plain PPO and not run again. Results are kept
in `runs/lag/results.json`; a rerun does only what is missing or has other settings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import common
import seeds
from seeds import Job, Result, Results

from tetherl.algorithm import Algorithm, Callbacks
from tetherl.config import RunConfig

LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("PPO, ε .2", {"loss": "plain"}),
    "lag_scaled": ("lag-scaled PPO, ε .2·(1 + .2·L) up to .8", {"loss": "lag_scaled"}),
    "wide": ("PPO, ε .4", {"loss": "plain", "clip_param": 0.4}),
    "slow": ("lag-scaled PPO, learning rate 3e-4", {"loss": "lag_scaled", "lr": 3e-4}),
    "decoupled": ("decoupled PPO, weights up to 10", {"loss": "decoupled"}),
}
"""Name -> (title, settings of `algorithm`)."""

OTHERS = ("wide", "slow")
"""At lag 0 these are not plain PPO."""

TASKS: dict[str, dict[str, Any]] = {
    "cartpole": {
        "env": "CartPole-v1",
        "algorithm": {
            "gamma": 0.98,
            "train_batch_size": 512,
            "minibatch_size": 128,
            "epochs": 4,
            "lr": 1e-3,
        },
        "rollouts": {"workers": 0, "envs_per_worker": 8, "fragment_length": 64},
        "stop": {"env_steps": 60_000},
    },
    "pendulum": {
        "env": "Pendulum-v1",
        "algorithm": {
            "gamma": 0.9,
            "train_batch_size": 512,
            "minibatch_size": 64,
            "epochs": 5,
            "lr": 1e-3,
            "reward_scaling": True,
        },
        "rollouts": {"workers": 0, "envs_per_worker": 8, "fragment_length": 64},
        "stop": {"env_steps": 80_000},
    },
}
LAGS = {"cartpole": (0, 4, 16), "pendulum": (0, 8)}
CRITERIA = {"cartpole-lag_scaled-16": ("training", 350.0), "pendulum-lag_scaled-8": ("greedy", -250.0)}
"""What two of three seeds must reach."""


def names() -> list[str]:
    found = []
    for task, lags in LAGS.items():
        for lag in lags:
            for loss in LOSSES:
                if lag > 0 or loss == "plain" or (loss == "wide" and task == "cartpole"):
                    found.append(f"{task}-{loss}-{lag}")
    return found


def job(name: str, seed: int, directory: Path) -> Job:
    task, loss, lag = name.rsplit("-", 2)
    base = TASKS[task]
    more = LOSSES[loss][1] | {"max_lag": int(lag)}
    return Job(name, seed, {**base, "algorithm": base["algorithm"] | more}, directory)


def train(job: Job) -> Result:
    lag = int(job.name.rpartition("-")[2])
    config = RunConfig.from_dict(
        {
            **job.settings,
            "name": job.run_name,
            "runs_dir": str(job.directory),
            "seed": job.seed,
            "resume": "auto",
            "checkpoint": {"interval": None, "at_end": False},
        }
    )
    curve = Curve()
    with Algorithm(config, curve, weights_lag=lag) as algorithm:
        metrics = algorithm.run().metrics
        greedy = seeds.evaluate(algorithm, explore=False)
    return {
        "date": date.today().isoformat(),
        "training": metrics["episode_return_mean"],
        "greedy": seeds.mean(greedy),
        "fell": curve.fell,
        "lag_max": metrics["lag/max"],
        "env_steps": metrics["env_steps"],
        "wall_s": metrics["time/total_s"],
    }


class Curve(Callbacks):
    """fell: whether the mean return of the last 100 episodes ever dropped by more than a third of its best."""

    def __init__(self) -> None:
        self._best = float("-inf")
        self.fell = False

    def on_iteration(self, algorithm: Algorithm, metrics: dict[str, Any]) -> None:
        if algorithm.tracker.full:
            mean = metrics["episode_return_mean"]
            self._best = max(self._best, mean)
            self.fell = self.fell or mean < self._best - abs(self._best) / 3


def passed(name: str, found: Sequence[Result]) -> int:
    """How many runs reached the criterion."""
    key, least = CRITERIA[name]
    return sum(r[key] >= least for r in found)


def cell(found: Sequence[Result], key: str) -> str:
    return ", ".join(f"{r[key]:.0f}{'↓' if r['fell'] else ''}".replace("-", "−") for r in found) or "–"


def table(document: dict[str, Any]) -> str:
    found = document["results"]
    header = ["loss", *(f"CartPole, L = {lag}" for lag in LAGS["cartpole"])]
    header += ["greedy at L = 16", *(f"Pendulum, greedy, L = {lag}" for lag in LAGS["pendulum"])]
    rows = []
    for loss, (title, _) in LOSSES.items():

        def of(task: str, lag: int, key: str, loss: str = loss) -> str:
            name = f"{task}-{loss}-{lag}"
            return cell(found[name], key) if name in found else "–" if loss in OTHERS else "as PPO"

        row = [title, *(of("cartpole", lag, "training") for lag in LAGS["cartpole"]), of("cartpole", 16, "greedy")]
        rows.append([*row, *(of("pendulum", lag, "greedy") for lag in LAGS["pendulum"])])
    lines = [common.table(header, rows), ""]
    lines.append(
        "One number per seed: CartPole the mean return of the last 100 training episodes after 60,000 steps, Pendulum "
        f"and “greedy” the mean of {seeds.EPISODES} greedy episodes after training (80,000 steps). ↓: the mean return "
        "of the last 100 episodes fell by more than a third at some point."
    )
    lines.append(seeds.machine_text([r for results in found.values() for r in results]))
    for name, (key, least) in CRITERIA.items():
        results = found.get(name, [])
        lines.append(
            f"Required of `{name}`: {key} at least {least:g}; {passed(name, results)} of {len(results)} reach it."
        )
    return "\n".join(lines)


def main() -> int:
    options = seeds.parser("Policy losses on old experience.", names(), "runs/lag").parse_args()
    results = Results(options.dir / "results.json")
    chosen = options.only or names()
    failures = seeds.fill(
        [job(n, s, options.dir) for n in chosen for s in options.seeds], results, train, options.workers
    )
    found = {name: results.of(name, job) for name in names()}
    document = {"benchmark": "lag", "results": found, "failures": failures}
    if any(found.values()):
        seeds.report("lag", options, document, table(document))
    missed = [name for name in CRITERIA if name in chosen and len(found[name]) >= 3 and passed(name, found[name]) < 2]
    for name in missed:
        common.say(f"{name}: missed")
    return 1 if failures or missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        common.say("interrupted")
        sys.exit(130)
