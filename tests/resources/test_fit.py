"""A plan against a machine: packing of GPUs, what is missing, which number to lower and to what."""

from __future__ import annotations

import itertools
import random
import re
from collections import defaultdict

import pytest

from tetherl.config import RunConfig
from tetherl.resources.fit import place
from tetherl.resources.machine import Machine
from tetherl.resources.plan import PlanRow, ResourcePlan


def row(role: str, count: int, gpus: float, cpus: float = 1, memory: int | None = None) -> PlanRow:
    return PlanRow(
        role=role, count=count, cpus=cpus, gpus=gpus, what="", why="", device="cuda", model_copies=1,
        memory_max=memory,
    )  # fmt: skip


def plan(*rows: PlanRow) -> ResourcePlan:
    return ResourcePlan(rows=rows)


def assert_valid(rows: list[PlanRow], gpus: int) -> None:
    """No device is overfull and every process has exactly what it asked for."""
    placement = place(rows, gpus)
    assert placement is not None
    load: dict[int, float] = defaultdict(float)
    asked = {(r.role, i): r.gpus for r in rows if r.gpus for i in range(1, r.count + 1)}
    assert {(role, index) for role, index, _ in placement} == set(asked)
    for role, index, devices in placement:
        share = asked[role, index]
        assert len(devices) == max(1, round(share)) and len(set(devices)) == len(devices)
        for device in devices:
            load[device] += min(1.0, share)
    assert all(0 <= device < gpus for device in load)
    assert all(total <= 1 + 1e-3 for total in load.values())


def test_case_046_shares_are_packed_device_by_device() -> None:
    assert_valid([row("algorithm", 1, 0.1), row("rollout", 2, 0.9)], 2)
    assert place([row("algorithm", 1, 0.2), row("rollout", 2, 0.9)], 2) is None  # 2.0 in all, but no way to divide
    problem = plan(row("algorithm", 1, 0.2), row("rollout", 2, 0.9)).on(Machine(cpus=9, gpus=2)).problems
    assert len(problem) == 1 and "no way to divide" in problem[0] and "to 0.8" in problem[0]


def test_case_037_the_whole_device_and_the_shares_do_not_mix() -> None:
    placement = place([row("rollout", 4, 0.25), row("algorithm", 1, 1)], 2)
    assert placement is not None
    assert {devices for role, _, devices in placement if role == "rollout"} == {(1,)}
    assert {devices for role, _, devices in placement if role == "algorithm"} == {(0,)}


def test_a_packing_that_the_greedy_order_misses_is_found() -> None:
    # Tightest first puts .35 to .65 and cannot place the last .2; .5+.3+.2 and .45+.35+.2 do fit.
    sizes = [0.5, 0.45, 0.35, 0.3, 0.2, 0.2]
    rows = [row(f"r{i}", 1, size) for i, size in enumerate(sizes)]
    assert_valid(rows, 2)


def test_packing_agrees_with_trying_everything() -> None:
    rng = random.Random(0)
    outcomes = set()
    for _ in range(300):
        sizes = [rng.choice([0.1, 0.2, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.9]) for _ in range(rng.randint(1, 6))]
        gpus = rng.randint(1, 3)
        possible = any(
            all(sum(s for s, d in zip(sizes, choice, strict=True) if d == device) <= 1 + 1e-9 for device in range(gpus))
            for choice in itertools.product(range(gpus), repeat=len(sizes))
        )
        rows = [row(f"r{i}", 1, size) for i, size in enumerate(sizes)]
        assert (place(rows, gpus) is not None) == possible, (sizes, gpus)
        if possible:
            assert_valid(rows, gpus)
        outcomes.add(possible)
    assert outcomes == {True, False}


def test_many_small_shares_fill_a_device_exactly() -> None:
    assert_valid([row("rollout", 1000, 0.001)], 1)
    assert_valid([row("rollout", 10, 0.1)], 1)
    assert_valid([row("rollout", 3, 1 / 3)], 1)
    assert place([row("rollout", 11, 0.1)], 1) is None


def test_half_a_gpu_for_the_run_is_one_device_with_half_the_room() -> None:
    assert place([row("algorithm", 1, 0.5)], 0.5) is not None
    assert place([row("algorithm", 1, 0.6)], 0.5) is None
    assert place([row("algorithm", 1, 1)], 0.5) is None


def test_case_044_a_plan_that_no_time_can_make_fit_is_refused_with_the_numbers_to_lower() -> None:
    """Row 10 of the oracle: 8 workers of 0.125 GPU and 1 for the algorithm, on one GPU."""
    config = RunConfig.from_dict(
        {
            "env": "CartPole-v1",
            "algorithm": {"gpus": 1},
            "rollouts": {"workers": 8, "gpus_per_worker": 0.125},
        }
    )
    checked = ResourcePlan.from_config(config).on(Machine(cpus=9, gpus=1))
    assert not checked.fits and checked.placement == ()
    (problem,) = checked.problems
    assert "needs 2 (algorithm 1 × 1, rollout 8 × 0.125)" in problem
    assert "1 missing" in problem and "rollout worker 1" in problem
    assert "algorithm.gpus to 0," in problem and "rollouts.gpus_per_worker to 0," in problem
    assert "algorithm.gpus to 0.5 and rollouts.gpus_per_worker to 0.0625" in problem


@pytest.mark.parametrize(
    ("rows", "machine", "mends"),
    [
        ([row("algorithm", 1, 0.5), row("rollout", 4, 0.25)], 1, {"rollouts.workers": 2, "algorithm.gpus": 0}),
        ([row("algorithm", 1, 0), row("learner", 4, 1)], 2, {"learners.workers": 2, "learners.gpus_per_worker": 0}),
        ([row("algorithm", 1, 2)], 1, {"algorithm.gpus": 1}),
        ([row("algorithm", 1, 1)], 0, {"algorithm.gpus": 0}),
        ([row("algorithm", 1, 0), row("evaluation", 2, 0.75)], 1, {"evaluation.gpus_per_worker": 0.5}),
    ],
)
def test_mends_are_as_small_as_they_can_be_and_really_mend(
    rows: list[PlanRow], machine: float, mends: dict[str, float]
) -> None:
    (problem,) = plan(*rows).on(Machine(cpus=99, gpus=machine)).problems
    said = {key: float(value) for key, value in re.findall(r"([a-z]+\.[a-z_]+) to ([\d.]*\d)", problem)}
    for key, value in mends.items():
        assert said[key] == value, problem


def test_cpus_beyond_the_machine_are_a_warning_unless_the_user_set_them() -> None:
    rows = [row("algorithm", 1, 0), row("rollout", 8, 0)]
    shared = plan(*rows).on(Machine(cpus=4, gpus=0))
    assert shared.fits
    assert "9 CPUs" in shared.warnings[0] and "2.2 times" in shared.warnings[0]
    refused = plan(*rows).on(Machine(cpus=4, gpus=0), user_set_cpus=True)
    assert not refused.fits and not refused.warnings
    assert "5 missing" in refused.problems[0] and "rollout worker 4" in refused.problems[0]
    assert "rollouts.workers to 3" in refused.problems[0] and "machine.cpus" in refused.problems[0]
    assert "rollouts.cpus_per_worker to 0.375" in refused.problems[0]
    assert plan(*rows).on(Machine(cpus=9, gpus=0), user_set_cpus=True).fits


def test_memory_beyond_the_machine_is_refused_and_unknown_memory_is_not() -> None:
    rows = [row("algorithm", 1, 0, memory=2 * 2**30), row("rollout", 2, 0, memory=3 * 2**30)]
    assert plan(*rows).on(Machine(cpus=9, gpus=0, memory=8 * 2**30)).fits
    (problem,) = plan(*rows).on(Machine(cpus=9, gpus=0, memory=7 * 2**30)).problems
    assert "8.0 GiB" in problem and "1.0 GiB missing" in problem and "rollouts.workers" in problem
    assert plan(*rows).on(Machine(cpus=9, gpus=0, memory=None)).fits
    assert plan(row("algorithm", 1, 0)).on(Machine(cpus=9, gpus=0, memory=1)).fits


def test_several_things_missing_are_all_said() -> None:
    rows = [row("algorithm", 1, 1, memory=2**40)]
    checked = plan(*rows).on(Machine(cpus=0.5, gpus=0, memory=2**30), user_set_cpus=True)
    assert [problem.split(":")[0] for problem in checked.problems] == ["CPUs", "GPUs", "memory"]
