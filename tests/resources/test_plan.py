"""The resource plan: rows, sums, reasons, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tetherl.config import RunConfig
from tetherl.errors import ConfigError
from tetherl.resources.explain import sentences, table
from tetherl.resources.machine import Machine
from tetherl.resources.plan import PROCESS_BYTES, ResourcePlan, serving_bytes

EXTERNAL = {
    "observation_space": {"type": "Box", "low": 0, "high": 255, "shape": [240, 320, 1], "dtype": "uint8"},
    "action_space": {"type": "MultiDiscrete", "nvec": [2] * 9},
}


def config(
    workers: int | None = None,
    cpus: float = 1,
    gpus: float = 0,
    *,
    driver: tuple[float, float] = (1, 0),
    learners: tuple[int, float, float] = (0, 1, 0),
    evaluation: tuple[int, float, float, int | None] = (0, 1, 0, None),
    **more: Any,
) -> RunConfig:
    return RunConfig.from_dict(
        {
            **({} if "external" in more else {"env": "CartPole-v1"}),
            "rollouts": {"workers": workers, "cpus_per_worker": cpus, "gpus_per_worker": gpus},
            "algorithm": {"cpus": driver[0], "gpus": driver[1]},
            "learners": dict(zip(("workers", "cpus_per_worker", "gpus_per_worker"), learners, strict=True)),
            "evaluation": dict(
                zip(("workers", "cpus_per_worker", "gpus_per_worker", "interval"), evaluation, strict=True)
            ),
            **more,
        }
    )


@pytest.mark.parametrize(
    ("case", "cpus", "gpus"),
    [
        (config(2, 2, 0.25, learners=(1, 2, 0.5)), 7, 1.0),  # rows 20, 36: learner CPUs beside a GPU
        (config(2, 2, 0.25, driver=(1, 0.25)), 5, 0.75),  # row 1
        (config(2), 3, 0),  # row 2
        (config(0, driver=(1, 1)), 1, 1),  # row 3
        (config(4, 0.5, driver=(1, 1)), 3, 1),  # row 4
        (config(3, 1, 0.2, driver=(1, 0.4), evaluation=(2, 1, 0.2, 1)), 6, 1.4),  # row 5
        (config(3, 1, 0.2, driver=(1, 0.4), evaluation=(2, 3, 0, 5)), 10, 1.0),  # row 7
        (config(2, driver=(4, 0)), 6, 0),  # row 8
        (config(8, 1, 0.125, driver=(1, 1)), 9, 2.0),  # row 10
        (config(0, evaluation=(1, 1, 0, 1)), 2, 0),  # row 12
        (config(0, evaluation=(0, 1, 0, 1)), 1, 0),  # row 13
        (config(2, driver=(1, 2)), 3, 2),  # row 14
        (config(2, learners=(2, 1, 1)), 5, 2),  # row 18
        (config(2, learners=(2, 2, 0)), 7, 0),  # row 19
        (config(4, learners=(1, 1, 1), evaluation=(2, 1, 0, 1)), 8, 1),  # row 21
        (config(external=EXTERNAL), 2, 0),
        (config(10, 0.1, 0.1), 2, 1.0),  # no rounding noise in the sums
    ],
)
def test_sums_match_the_arithmetic_of_the_settings(case: RunConfig, cpus: float, gpus: float) -> None:
    plan = ResourcePlan.from_config(case)
    assert plan.total[:2] == (cpus, gpus)
    assert sum(row.count * row.cpus for row in plan.rows) == pytest.approx(cpus)


def test_case_034_no_evaluation_no_reservation() -> None:
    """With evaluation workers that would never run, rows 5 and 6 of the oracle differ: refused, not reserved."""
    assert ResourcePlan.from_config(config(3, evaluation=(2, 1, 0, 1))).row("evaluation") is not None
    assert ResourcePlan.from_config(config(3)).row("evaluation") is None
    with pytest.raises(ConfigError, match=r"evaluation\.workers: 2 would never be used.*evaluation\.interval"):
        config(3, evaluation=(2, 1, 0, None))


def test_case_033_gpus_of_an_algorithm_process_that_does_nothing_with_them_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.gpus: 0\.25 does nothing"):
        config(2, 2, 0.25, driver=(1, 0.25), learners=(1, 2, 0.5))
    plan = ResourcePlan.from_config(config(2, 2, 0.25, learners=(1, 2, 0.5)))
    assert (plan.row("algorithm").gpus, plan.row("learner").gpus) == (0, 0.5)  # type: ignore[union-attr]


def test_case_040_gpu_fractions_work_and_what_no_machine_can_give_is_refused() -> None:
    assert ResourcePlan.from_config(config(driver=(1, 0.5))).total.gpus == 0.5
    with pytest.raises(ConfigError, match=r"learners\.gpus_per_worker: 0\.5 with 2 learner workers"):
        config(2, learners=(2, 1, 0.5))
    with pytest.raises(ConfigError, match=r"algorithm\.gpus: 1\.5 is neither .* set 1 or 2"):
        config(driver=(1, 1.5))


def test_device_cpu_takes_all_gpu_numbers_away_with_one_remark() -> None:
    plan = ResourcePlan.from_config(config(2, 2, 0.25, driver=(1, 0.25), learners=(1, 2, 0.5), device="cpu"))
    assert plan.total[:2] == (7, 0)
    assert {row.device for row in plan.rows} == {"cpu"}
    assert [w for w in plan.warnings if "GPU" in w] == [
        "device is cpu: the 1.25 GPUs that the configuration gives are not used"
    ]
    assert not ResourcePlan.from_config(config(2, device="cpu")).warnings


def test_every_row_says_what_it_does_why_it_is_there_and_what_it_holds() -> None:
    plan = ResourcePlan.from_config(config(external=EXTERNAL))
    algorithm, rollout = plan.rows
    assert "learners.workers is 0" in algorithm.why and "gradients" in algorithm.what
    assert "1 (the default with external)" in rollout.why and "policy server" in rollout.what
    assert (algorithm.model_copies, rollout.model_copies) == (1, 1)

    alone = ResourcePlan.from_config(config(0, evaluation=(0, 1, 0, 5))).rows
    assert len(alone) == 1
    assert "rollouts.workers is 0" in alone[0].why and "evaluation.workers is 0" in alone[0].why
    assert alone[0].model_copies == 3  # learner, sampler, evaluator

    split = ResourcePlan.from_config(config(2, learners=(2, 1, 0), evaluation=(1, 1, 0, 5)))
    assert [(row.role, row.count, row.model_copies) for row in split.rows] == [
        ("algorithm", 1, 0),
        ("rollout", 2, 1),
        ("learner", 2, 1),
        ("evaluation", 1, 1),
    ]


def test_memory_bounds_follow_from_the_size_of_a_step() -> None:
    case = RunConfig.from_dict(
        {"external": EXTERNAL, "algorithm": {"train_batch_size": 1000, "minibatch_size": 100}}
    ).resolved()
    assert ResourcePlan.from_config(case).total.memory_max is None
    plan = ResourcePlan.from_config(case, row_bytes=80_000)
    assert case.rollouts.queue_bytes is not None
    algorithm, rollout = plan.rows
    assert algorithm.memory_max == PROCESS_BYTES + case.rollouts.queue_bytes + 2 * 1000 * 80_000
    assert rollout.memory_max == PROCESS_BYTES + sum(serving_bytes(case, 80_000))
    assert serving_bytes(case, 80_000) == (32 * 128 * 80_000, 64 * 2**20)
    assert plan.total.memory_max == algorithm.memory_max + rollout.memory_max
    assert plan.to_dict()["total"]["memory_max"] == plan.total.memory_max


def test_the_document_names_every_number() -> None:
    plan = ResourcePlan.from_config(config(2, 2, 0.25, learners=(1, 2, 0.5)), row_bytes=100)
    document = plan.on(Machine(cpus=9, gpus=2, memory=2**40)).to_dict()
    assert set(document) == {"rows", "total", "machine", "placement", "fits", "problems", "warnings"}
    for row in document["rows"]:
        assert set(row) == {
            *("role", "count", "cpus", "gpus", "what", "why", "device", "model_copies", "memory_max"),
        }
    assert document["machine"] == {"cpus": 9, "gpus": 2, "memory": 2**40}
    assert document["fits"] is True and document["problems"] == []


def test_case_041_the_text_names_the_device_of_each_role() -> None:
    plan = ResourcePlan.from_config(config(4, 1, 0.25, driver=(1, 1))).on(Machine(cpus=9, gpus=2))
    by_role = {row[0]: row for row in table(plan)}
    assert by_role["algorithm"][4] == "cuda:0" and by_role["rollout"][4] == "cuda:1"
    assert by_role["total"][1:4] == ("5", "5", "2")
    text = "\n".join(sentences(plan))
    assert "algorithm 1 × 1 + rollout 4 × 0.25 = 2" in text and "The plan fits." in text
