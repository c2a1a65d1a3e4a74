"""Trains with the whole system in one process: rollout worker, queue, learner, weights, evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tetherl.algorithm import Algorithm, Callbacks
from tetherl.algorithms.ppo import PPOLearner
from tetherl.config import RunConfig
from tetherl.models.policy import Policy
from tetherl.testing.probes import Cue
from tetherl.workers.evaluator import Evaluator
from tetherl.workers.rollout import RolloutWorker
from tetherl.workers.spec import WorkerSpec

TEST_EPISODES = 64


class Run(Callbacks):
    """One training; `metrics` of all iterations, `greedy` and `sampled` mean returns at its end."""

    def __init__(self, env: Any, directory: Any, *, steps: int, weights_lag: int = 0, **settings: Any) -> None:
        self.metrics: list[dict[str, Any]] = []
        algorithm = {"lr": [[0, 5e-3], [steps, 0.0]], "minibatch_size": 64, "epochs": 8, "train_batch_size": 256}
        config = RunConfig.from_dict(
            {
                "env": env,
                "env_config": settings.pop("env_config", {}),
                "model": {"fcnet_hiddens": [32]} | settings.pop("model", {}),
                "rollouts": {"workers": 0, "envs_per_worker": 8} | settings.pop("rollouts", {}),
                "algorithm": algorithm | settings,
                # Never during training, but there to be asked at its end.
                "evaluation": {"interval": 1_000_000},
                "checkpoint": {"interval": None, "at_end": False},
                "stop": {"env_steps": steps},
                "engine": "inline",
                "runs_dir": str(directory),
                "name": "probe",
            }
        )
        with Algorithm(config, self, weights_lag=weights_lag) as algorithm:
            algorithm.run()
            self.policy = algorithm.policy
            self.greedy = float(np.mean(algorithm.evaluate(TEST_EPISODES).returns))
            self.sampled = float(np.mean(algorithm.evaluate(TEST_EPISODES, explore=True).returns))

    def on_iteration(self, algorithm: Algorithm, metrics: dict[str, Any]) -> None:
        # Fresh rows are as probable as when they were played, before the first step.
        assert metrics.get("learner/ratio_max_first", 0.0) <= 1e-4
        self.metrics.append(dict(metrics))

    def outputs(self, *observations: Any) -> tuple[torch.Tensor, np.ndarray]:
        """Distribution inputs and values, in reward units, at the first step of an episode."""
        policy, n = self.policy, len(observations)
        rows = policy.codec.stack([policy.codec.encode(o) for o in observations])
        obs = {leaf: torch.from_numpy(array) for leaf, array in rows.items()}
        no_action = torch.zeros(n, policy.actions.width, dtype=policy.dist.action_dtype)
        with torch.no_grad():
            out = policy(obs, no_action, torch.zeros(n), torch.zeros(n, dtype=torch.bool), [1] * n, None)
        return out.dist, policy.denormalize(out.values).numpy()

    def values(self, *observations: Any) -> np.ndarray:
        return self.outputs(*observations)[1]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train(tmp_path) -> Callable[..., Run]:
    """`train(env, steps=..., env_config=, model=, rollouts=, weights_lag=, **settings of algorithm)`."""

    def start(env: Any, **settings: Any) -> Run:
        start.count += 1
        return Run(env, tmp_path / str(start.count), **settings)

    start.count = 0
    return start


@pytest.fixture
def late_cue_score() -> Callable[..., float]:
    """Greedy return of P8 when a new policy version comes every three steps, in the middle of the episodes, and the one
    that acts is `weights_lag` versions old. Five workers whose episodes end at different times: so every version has
    a batch to learn from."""

    def score(weights_lag: int, steps: int = 40_000, workers: int = 5) -> float:
        config = RunConfig.from_dict(
            {
                "env": Cue,
                "model": {"fcnet_hiddens": [32], "use_lstm": True, "lstm_cell_size": 32, "max_seq_len": 16},
                "algorithm": {
                    "minibatch_size": 256,
                    "epochs": 4,
                    "lr": [[0, 3e-3], [steps, 0.0]],
                    # An episode of ten steps sees four versions.
                    "max_lag": weights_lag + 4,
                },
            }
        ).resolved()

        def spec(index: int) -> WorkerSpec:
            return WorkerSpec(index=index, seed=0, model=config.model, env=Cue, envs=32, batch_mode="complete_episodes")

        rollouts = [RolloutWorker(spec(i + 1)) for i in range(workers)]
        for i, worker in enumerate(rollouts):
            worker.sample(i * Cue.length // workers)
        policy = Policy(Cue.observation_space, Cue.action_space, config.model, seed=0)
        learner = PPOLearner(policy, config.algorithm, max_seq_len=config.model.max_seq_len, seed=0)
        published = deque([(policy.weights(), 0)], maxlen=weights_lag + 1)
        trained = version = mixed = 0
        while trained < steps:
            fragments = []
            for worker in rollouts:
                worker.set_weights(*published[0])
                fragments += worker.sample(3).fragments
            result = learner.update(fragments, version=version, steps_trained=trained)
            assert not any(result.dropped.values())
            trained += result.trained
            mixed += sum(len(set(f.versions.tolist())) > 1 for f in fragments)
            if version > 10:
                assert result.metrics["lag/min"] >= weights_lag
            version += 1
            published.append((policy.weights(), version))
        assert mixed > 0.9 * trained / Cue.length
        evaluator = Evaluator(spec(1))
        evaluator.set_weights(policy.weights(), version)
        return float(np.mean(evaluator.evaluate(TEST_EPISODES).returns))

    return score
