"""`state_source: stored`: chunks of recurrent policies start from the states that the actor had."""

from __future__ import annotations

import numpy as np
import pytest

from tetherl.algorithm import Algorithm
from tetherl.config import RunConfig
from tetherl.data.fragment import Fragment


@pytest.mark.parametrize(("burn_in", "every"), [(0, 8), (4, 4), (3, 1), (16, 8)])
def test_a_state_travels_wherever_burn_in_can_begin(tmp_path, burn_in, every):
    settings = {
        "name": "run",
        "runs_dir": str(tmp_path),
        "env": "CartPole-v1",
        "engine": "inline",
        "algorithm": {"state_source": "stored", "burn_in": burn_in},
        "model": {"use_lstm": True, "lstm_cell_size": 16, "max_seq_len": 8},
    }
    with Algorithm(RunConfig.from_dict(settings)) as algorithm:
        assert algorithm.team._state_every() == every


@pytest.mark.parametrize("source", ["stored", "recomputed"])
def test_states_travel_when_they_are_asked_for_and_agree_on_fresh_data(tmp_path, source):
    config = RunConfig.from_dict(
        {
            "name": "run",
            "runs_dir": str(tmp_path),
            "env": "CartPole-v1",
            "engine": "inline",
            "algorithm": {"train_batch_size": 256, "minibatch_size": 128, "epochs": 2, "state_source": source},
            "model": {"use_lstm": True, "lstm_cell_size": 16, "max_seq_len": 8},
            "rollouts": {"envs_per_worker": 4, "fragment_length": 32},
            "stop": {"iterations": 2},
        }
    )
    batches: list[list[Fragment]] = []
    with Algorithm(config) as algorithm:
        take = algorithm.take_all

        def watch() -> list[Fragment]:
            batches.append(take())
            return batches[-1]

        algorithm.take_all = watch
        algorithm.run()
        metrics = algorithm.run_dir.metrics.read()
    assert len(batches) == 2
    assert all(line["learner/ratio_max_first"] <= 1e-4 for line in metrics)
    for f in (f for batch in batches for f in batch):
        if source == "recomputed":
            assert f.states is None
        else:
            assert f.states.shape == (-(-len(f) // 8), 32)
            assert np.array_equal(f.states[0], f.state_in)
