"""Every configuration in examples/anchors is valid and trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tetherl.algorithm import Algorithm
from tetherl.config import RunConfig

FILES = sorted((Path(__file__).resolve().parents[2] / "examples" / "anchors").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_anchor_trains(path, tmp_path):
    if path.stem.startswith("minigrid"):
        pytest.importorskip("minigrid", reason="MiniGrid needs the extra 'examples'")
    settings = ["stop={env_steps: null, iterations: 1}", f"runs_dir={tmp_path}", "name=x", "checkpoint.at_end=false"]
    config = RunConfig.load(path, settings)
    if config.external is not None:
        config.resolved()  # benchmarks/anchors.py plays it
        return
    with Algorithm(config) as algorithm:
        metrics = algorithm.run().metrics
    assert metrics["steps/trained"] == metrics["steps/received"] > 0
