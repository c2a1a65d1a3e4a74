"""A resource plan in words, and as a document for machines."""

from __future__ import annotations

from typing import Any

from tetherl.resources.fit import byte_text
from tetherl.resources.plan import PlanRow, ResourcePlan

COLUMNS = ("role", "processes", "CPUs each", "GPUs each", "device", "model copies", "memory each, at most")


def document(plan: ResourcePlan) -> dict[str, Any]:
    """What `tetherl plan --json` prints."""
    machine = plan.machine
    return {
        "rows": [
            {
                "role": row.role,
                "count": row.count,
                "cpus": row.cpus,
                "gpus": row.gpus,
                "device": device(plan, row),
                "model_copies": row.model_copies,
                "memory_max": row.memory_max,
                "what": row.what,
                "why": row.why,
            }
            for row in plan.rows
        ],
        "total": plan.total._asdict(),
        "machine": None if machine is None else {"cpus": machine.cpus, "gpus": machine.gpus, "memory": machine.memory},
        "placement": [{"role": role, "index": index, "gpus": list(devices)} for role, index, devices in plan.placement],
        "fits": plan.fits,
        "problems": list(plan.problems),
        "warnings": list(plan.warnings),
    }


def device(plan: ResourcePlan, row: PlanRow) -> str:
    """ "cpu", or the devices that the processes of a role got: "cuda:0", "cuda:0, cuda:1"."""
    got = sorted({number for role, _, devices in plan.placement if role == row.role for number in devices})
    return ", ".join(f"cuda:{number}" for number in got) or row.device


def table(plan: ResourcePlan) -> list[tuple[str, ...]]:
    """The rows under COLUMNS, the total last."""
    lines = [
        (
            row.role,
            str(row.count),
            f"{row.cpus:g}",
            f"{row.gpus:g}",
            device(plan, row),
            str(row.model_copies),
            "?" if row.memory_max is None else byte_text(row.memory_max),
        )
        for row in plan.rows
    ]
    processes = sum(row.count for row in plan.rows)
    copies = sum(row.count * row.model_copies for row in plan.rows)
    memory = plan.total.memory_max
    total = ("total", str(processes), f"{plan.total.cpus:g}", f"{plan.total.gpus:g}", "", str(copies))
    return [*lines, (*total, "?" if memory is None else byte_text(memory))]


def sentences(plan: ResourcePlan) -> list[str]:
    """What each role does and why it is there, then the sums, the machine and the verdict."""
    lines = [f"{row.role}: {row.what}.\n  Why: {row.why}." for row in plan.rows]
    sums = " + ".join(f"{row.role} {row.count} × {row.cpus:g}" for row in plan.rows)
    lines.append(f"CPUs: {sums} = {plan.total.cpus:g}")
    using = [row for row in plan.rows if row.gpus]
    if using:
        sums = " + ".join(f"{row.role} {row.count} × {row.gpus:g}" for row in using)
        lines.append(f"GPUs: {sums} = {plan.total.gpus:g}")
    machine = plan.machine
    if machine is not None:
        memory = "not known" if machine.memory is None else byte_text(machine.memory)
        lines.append(f"machine: CPUs {machine.cpus:g}, GPUs {machine.gpus:g}, memory {memory}")
        lines.append("The plan fits." if plan.fits else "The plan does not fit.")
    lines += [f"problem: {problem}" for problem in plan.problems]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return lines
