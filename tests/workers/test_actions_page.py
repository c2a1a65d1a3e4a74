"""The environment on docs/actions.md is played as the page says."""

from __future__ import annotations

import re
from pathlib import Path

from tetherl.models.config import ModelConfig
from tetherl.workers.evaluator import Evaluator
from tetherl.workers.rollout import RolloutWorker
from tetherl.workers.spec import WorkerSpec

PAGE = (Path(__file__).parents[2] / "docs" / "actions.md").read_text(encoding="utf-8")


def test_the_environment_on_the_page_is_never_asked_for_the_impossible():
    program: dict = {}
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(source, "docs/actions.md", "exec"), program)
    spec = WorkerSpec(index=1, seed=0, model=ModelConfig(fcnet_hiddens=[8]), env=program["Switches"], envs=3)
    worker = RolloutWorker(spec)
    fragments = worker.sample(60).fragments
    worker.close()
    assert any(len(f) > 1 for f in fragments)
    for f in fragments:
        assert (f.mask == (f.obs[""] == 0)).all()
    assert Evaluator(spec).evaluate(5, explore=True).lengths
