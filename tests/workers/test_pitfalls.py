"""Ways in which workers could spoil experience or scores unnoticed; see docs/correctness.md."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.models.config import ModelConfig
from tetherl.testing.environments import CountingEnv
from tetherl.workers.evaluator import Evaluator
from tetherl.workers.rollout import RolloutWorker
from tetherl.workers.spec import WorkerSpec


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spec(env: Any, *, index: int = 1, envs: int = 1, **more: Any) -> WorkerSpec:
    model = more.pop("model", ModelConfig(fcnet_hiddens=[8]))
    return WorkerSpec(index=index, seed=0, model=model, env=env, envs=envs, vectorization="sync", **more)


class Valve(gymnasium.Env):
    """Keeps the actions that it is given, between 300 and 500."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(300, 500, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.given: list[np.ndarray] = []
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.given.append(np.array(action))
        return np.zeros(1, np.float32), 0.0, False, False, {"given": self.given}


def test_the_environment_gets_the_clipped_action_and_the_learner_the_one_that_was_drawn():
    worker = RolloutWorker(spec(Valve, model=ModelConfig(fcnet_hiddens=[8], log_std_init=0.5)))
    (fragment,) = worker.sample(100).fragments
    given = np.array(worker._env._env.envs[0].unwrapped.given)
    rows, dist = torch.from_numpy(fragment.actions), torch.from_numpy(fragment.dist)
    outside = (rows.abs() > 1).any(1)
    assert 20 < outside.sum() < 100
    np.testing.assert_allclose(given, (400 + 100 * fragment.actions).clip(300, 500), rtol=1e-5)
    log_prob = worker._policy.dist.log_prob
    np.testing.assert_allclose(log_prob(dist, rows).numpy(), fragment.logp, atol=1e-5)
    clipped = log_prob(dist, rows.clamp(-1, 1)).numpy()
    assert (np.abs(clipped - fragment.logp)[outside] > 1e-3).mean() > 0.9


class OneBuffer(CountingEnv):
    """Returns the same array each time, with other numbers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(2, np.float32)

    def _observation(self) -> np.ndarray:
        self.buffer[:] = super()._observation()
        return self.buffer


def test_rows_are_copies_of_an_observation_that_is_written_over():
    worker = RolloutWorker(spec(OneBuffer, envs=2, fragment_length=5))
    fragments = [f for number in range(4) for f in worker.sample(10, number + 1).fragments]
    assert len(fragments) > 8
    for f in fragments:
        episode = f.obs[""][0, 0]
        assert f.obs[""].tolist() == [[episode, f.t0 + t] for t in range(len(f))]
        assert f.final_obs is None or f.final_obs[""].tolist() == [episode, f.t0 + len(f)]


def test_workers_and_copies_draw_different_actions_and_repeat_their_own():
    def actions(index: int) -> list[list[int]]:
        worker = RolloutWorker(spec(CountingEnv, index=index, envs=2, env_config={"min_length": 64, "max_length": 64}))
        return [f.actions[:, 0].tolist() for f in worker.sample(50).fragments]

    first, second = actions(1), actions(2)
    assert len({tuple(column) for column in first + second}) == 4
    assert first == actions(1)


def test_short_episodes_count_no_more_than_long_ones_in_an_evaluation():
    """All that were asked for, not those that end first: the number of copies makes no difference."""
    settings = {"env_config": {"min_length": 1, "max_length": 40}}
    results = [Evaluator(spec(CountingEnv, envs=envs, **settings)).evaluate(12) for envs in (1, 4, 12)]
    assert all(result == results[0] for result in results)
    lengths = results[0].lengths
    assert results[0].returns == [n * (n + 1) / 2 for n in lengths]
    assert max(lengths) > 4 * min(lengths)
