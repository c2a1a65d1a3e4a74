# ruff: noqa: T201
"""`tetherl plan`: show and explain the resource plan; starts nothing."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from tetherl.cli.common import add_config_arguments, load_config, print_json, print_table, rich_table
from tetherl.errors import ConfigError

if TYPE_CHECKING:
    from tetherl.resources.machine import Machine
    from tetherl.resources.plan import ResourcePlan


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="show and explain the resource plan; starts nothing",
        description="Show which processes a run would have, what each gets and why, and whether that fits. "
        "Exit code 0: it fits (with a warning where processes share CPUs), 3: it does not, 2: bad configuration.",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--machine",
        metavar="cpus=N,gpus=N",
        help="check against a machine with these numbers (cpus, gpus, memory in bytes) instead of this one",
    )


def run(args: argparse.Namespace) -> int:
    try:
        plan = _plan(args)
    except ConfigError as error:
        if args.json:
            print_json({"rows": [], "fits": False, "problems": [str(error)], "warnings": []})
        print(f"tetherl: {error}", file=sys.stderr)
        return 2
    if args.json:
        print_json(plan.to_dict())
    else:
        from tetherl.resources.explain import COLUMNS, sentences, table

        print_table(COLUMNS, table(plan))
        print("\n" + "\n".join(sentences(plan)))
    return 0 if plan.fits else 3


def _plan(args: argparse.Namespace) -> ResourcePlan:
    from tetherl.resources.machine import Machine
    from tetherl.resources.plan import ResourcePlan

    config = load_config(args).resolved()
    if args.machine is None:
        return ResourcePlan.for_this_machine(config)[0]
    machine, given = _machine(args.machine, Machine.detect().limited(config.machine))
    plan = ResourcePlan.from_config(config, config.row_bytes())
    return plan.on(machine, user_set_cpus="cpus" in given or config.machine.cpus is not None)


def _machine(text: str, otherwise: Machine) -> tuple[Machine, set[str]]:
    """The machine that --machine describes; the memory of another machine is only known when it is given."""
    numbers: dict[str, Any] = {"memory": None}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if key not in ("cpus", "gpus", "memory") or not number >= (1 if key == "memory" else 0):
            raise ConfigError(f"--machine: got {part!r}; expected cpus=N, gpus=N or memory=BYTES, joined by commas")
        numbers[key] = int(number) if key == "memory" else number
    given = {key for key, value in numbers.items() if value is not None}
    return dataclasses.replace(otherwise, **numbers), given


def plan_table(plan: ResourcePlan) -> Any:
    """The plan as a rich table."""
    from tetherl.resources.explain import COLUMNS, table

    return rich_table(COLUMNS, table(plan))
