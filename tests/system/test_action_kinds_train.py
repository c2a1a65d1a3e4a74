"""Whole runs: masked clients, and actions of several parts, over the wire into the learner and a checkpoint."""

from __future__ import annotations

import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tetherl.algorithm import Algorithm
from tetherl.client.envloop import Player
from tetherl.config import RunConfig
from tetherl.spaces import space_to_spec

PARTS = spaces.Dict({"aim": spaces.Box(0, 9, (2,), np.float32), "keys": spaces.Tuple([spaces.Discrete(3, start=1)])})


class Game(gymnasium.Env):
    """Six steps; raises at an action that the space, or the mask that it showed, does not allow."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, action_space: spaces.Space) -> None:
        self.action_space = action_space
        self.masked = isinstance(action_space, spaces.Discrete)

    def _look(self):
        info = {}
        if self.masked:
            mask = self.np_random.random(self.action_space.n) < 0.5
            mask[self.np_random.integers(len(mask))] = True
            info["action_mask"] = mask
        self.info = info
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._look()

    def step(self, action):
        if self.masked:
            assert self.info["action_mask"][action]
        else:
            assert self.action_space["aim"].contains(action["aim"]) and action["keys"][0] in (1, 2, 3)
        self.t += 1
        obs, info = self._look()
        return obs, 1.0, self.t == 6, False, info


@pytest.mark.parametrize(
    ("space", "model"),
    [
        (spaces.Discrete(5), {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}),
        (PARTS, {"use_lstm": True, "lstm_cell_size": 8, "action_distribution": "tanh"}),
        (PARTS, {}),
    ],
    ids=["masked", "parts squashed", "parts"],
)
def test_clients_train_and_the_run_can_be_resumed(tmp_path, space, model):
    config = {
        "name": "run",
        "runs_dir": str(tmp_path / "runs"),
        "engine": "inline",
        "external": {
            "observation_space": space_to_spec(Game.observation_space),
            "action_space": space_to_spec(space),
            "port": 0,
            "worker_port": 0,
            "during_learning": "hold",
        },
        "algorithm": {"train_batch_size": 96, "minibatch_size": 32, "epochs": 2},
        "model": model,
        "stop": {"iterations": 2},
        "checkpoint": {"at_end": True},
    }
    failures: list[BaseException] = []
    for iterations in (2, 3):
        with Algorithm(RunConfig.from_dict(config | {"stop": {"iterations": iterations}})) as algorithm:
            player = Player(lambda: Game(space), algorithm.url, seed=1)

            def play(player=player):
                try:
                    player.run()
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=play)
            thread.start()
            algorithm.run()
            algorithm.announce("stopped")
            thread.join(60)
            assert not thread.is_alive() and not failures, failures
            lines = algorithm.run_dir.metrics.read()
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert all(line["learner/ratio_max_first"] <= 1e-4 for line in lines)
