"""What a run says in metrics.jsonl, TensorBoard reads from its event files; also after a resume."""

from __future__ import annotations

import pytest

from tetherl.algorithm import Algorithm
from tetherl.config import RunConfig
from tetherl.testing.probes import Alternate

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def train(tmp_path, iterations, *, crash=0):
    """Checkpoints every second iteration; `crash` iterations more end without one."""
    config = RunConfig.from_dict(
        {
            "env": Alternate,
            "algorithm": {"train_batch_size": 64, "minibatch_size": 32, "epochs": 1},
            "stop": {"iterations": iterations},
            "runs_dir": str(tmp_path),
            "name": "run",
            "checkpoint": {"interval": 2},
            "engine": "inline",
        }
    )
    with Algorithm(config) as algorithm:
        algorithm.run()
        for _ in range(crash):
            algorithm.step()
        return algorithm.run_dir


def test_event_files_hold_every_metric_once(tmp_path):
    train(tmp_path, 2, crash=1)
    run = train(tmp_path, 4)
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    lines = run.metrics.read()
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    keys = {key for line in lines for key, value in line.items() if value is not None}
    assert set(events.Tags()["scalars"]) == keys
    for key in keys:
        expected = [(line["env_steps"], line[key]) for line in lines if line.get(key) is not None]
        found = [(event.step, event.value) for event in events.Scalars(key)]
        assert [step for step, _ in found] == [step for step, _ in expected], key
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6), key
