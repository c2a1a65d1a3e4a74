"""How fast CartPole-v1 is trained in one process, next to its parts on the same machine.

    python benchmarks/training.py [--seconds 5] [--rounds 3] [--json] [--write]

8 environments, 2,048 samples per iteration, 10 epochs of minibatches of 256, two separate networks (policy and value)
of two hidden layers of 64. In each round, one after the other, each for `--seconds` or at least once:

* bare stepping: 8 Gymnasium environments with fixed actions, one by one; no policy can be faster
* bare vector: the same in the vector that Gymnasium makes of them, which the rollout worker uses
* sampling: the rollout worker, without learning
* learning: updates from one and the same batch, without sampling
* training: whole iterations of `Algorithm`, metrics and all
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import common
import gymnasium
import numpy as np

from tetherl.algorithm import Algorithm
from tetherl.algorithms.config import AlgorithmConfig
from tetherl.algorithms.ppo import PPOLearner
from tetherl.config import RunConfig
from tetherl.data.fragment import Fragment
from tetherl.models.config import ModelConfig
from tetherl.models.policy import Policy
from tetherl.runs.config import CheckpointConfig
from tetherl.workers.config import RolloutConfig
from tetherl.workers.rollout import RolloutWorker
from tetherl.workers.spec import WorkerSpec

ENV = "CartPole-v1"
ENVS = 8
BATCH = 2048
MODEL = ModelConfig(fcnet_hiddens=[64, 64])
ALGORITHM = AlgorithmConfig(train_batch_size=BATCH, minibatch_size=256, epochs=10, lr=3e-4)
TEXTS = {
    "stepping": "bare stepping, one by one",
    "vector": "bare stepping, as one vector",
    "sampling": "sampling only",
    "learning": "learning only",
    "training": "training",
}


class Parts:
    """What is measured: each method does a piece of work and gives the environment steps that it stands for."""

    def __init__(self, stack: ExitStack) -> None:
        config = RunConfig(
            env=ENV,
            model=MODEL,
            algorithm=ALGORITHM,
            rollouts=RolloutConfig(envs_per_worker=ENVS, fragment_length=BATCH // ENVS),
            checkpoint=CheckpointConfig(interval=None, at_end=False),
            runs_dir=stack.enter_context(tempfile.TemporaryDirectory()),
            name="benchmark",
        )
        self._algorithm = stack.enter_context(Algorithm(config))
        config = self._algorithm.config
        spec = WorkerSpec(
            index=1,
            seed=0,
            model=config.model,
            env=ENV,
            envs=ENVS,
            fragment_length=config.rollouts.fragment_length,
            gamma=config.algorithm.gamma,
        )
        self._worker = RolloutWorker(spec)
        stack.callback(self._worker.close)
        self._samples = 0
        self._batch = self._sample()
        self._learner = PPOLearner(
            Policy(self._algorithm.observation_space, self._algorithm.action_space, config.model),
            config.algorithm,
            max_seq_len=config.model.max_seq_len,
            seed=0,
        )
        self._envs = [gymnasium.make(ENV) for _ in range(ENVS)]
        self._vector = gymnasium.make_vec(ENV, num_envs=ENVS)
        stack.callback(self._vector.close)
        self._vector.reset(seed=0)
        for env in self._envs:
            stack.callback(env.close)
            env.reset(seed=0)
        self._actions = np.random.default_rng(0).integers(0, 2, (BATCH // ENVS, ENVS))

    def stepping(self) -> int:
        for actions in self._actions.tolist():
            for env, action in zip(self._envs, actions, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        return BATCH

    def vector(self) -> int:
        for actions in self._actions:
            self._vector.step(actions)
        return BATCH

    def sampling(self) -> int:
        return sum(map(len, self._sample()))

    def learning(self) -> int:
        return self._learner.update(self._batch, version=0, steps_trained=0).trained

    def training(self) -> int:
        before = self._algorithm.metrics.get("env_steps", 0)
        self._algorithm.step()
        return int(self._algorithm.metrics["env_steps"]) - before

    def _sample(self) -> list[Fragment]:
        self._samples += 1
        return self._worker.sample(BATCH // ENVS, self._samples).fragments


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """All parts, `rounds` times; median, least and most."""
    with ExitStack() as stack:
        parts = Parts(stack)
        work: dict[str, Callable[[], int]] = {name: getattr(parts, name) for name in TEXTS}
        for one in work.values():  # the first time is slow
            one()
        conditions = common.Conditions()
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
        for number in range(1, rounds + 1):
            common.say(f"training: round {number} of {rounds}")
            for name, one in work.items():
                rates[name].append(_rate(one, seconds))
        facts = conditions.facts()
    limit = common.median([cpu for _, cpu in rates["stepping"]])
    rows = []
    for name, found in rates.items():
        speeds, cpu = [speed for speed, _ in found], common.median([cpu for _, cpu in found])
        numbers = {"steps_per_s": common.median(speeds), "least": min(speeds), "most": max(speeds)}
        rows.append({"name": name, **numbers, "cpu_us_per_step": cpu, "ratio": limit / cpu})
    return {"benchmark": "training", **facts, "rows": rows}


def _rate(one: Callable[[], int], seconds: float) -> tuple[float, float]:
    """Environment steps per second, and processor time per step in microseconds."""
    steps, started, cpu = 0, time.perf_counter(), time.process_time()
    while True:
        steps += one()
        passed = time.perf_counter() - started
        if passed >= seconds:
            return steps / passed, (time.process_time() - cpu) / steps * 1e6


def tables(document: dict[str, Any]) -> str:
    header = ["", "env steps/s", "lowest – highest", "CPU µs per step", "steps per CPU second", "of bare stepping"]
    lines = [
        [
            TEXTS[row["name"]],
            f"{row['steps_per_s']:,.0f}",
            f"{row['least']:,.0f} – {row['most']:,.0f}",
            f"{row['cpu_us_per_step']:.0f}",
            f"{1e6 / row['cpu_us_per_step']:,.0f}",
            f"{100 * row['ratio']:.0f} %",
        ]
        for row in document["rows"]
    ]
    return common.table(header, lines)


def main() -> int:
    options = common.parser("Training of CartPole-v1 in one process, next to its parts.", seconds=5).parse_args()
    return common.main("training", options, lambda: measure(options.seconds, options.rounds), tables)


if __name__ == "__main__":
    sys.exit(main())
