"""`tetherl config`: every setting, its value, default, where it came from, and its meaning."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tetherl.cli.common import add_config_arguments, load_config, print_json, print_table


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "config",
        help="every setting: value, default, where it came from, meaning",
        description="Show every setting of a run as it would be used, derived ones included.",
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from tetherl.config import describe

    settings = describe(load_config(args).resolved())
    if args.json:
        print_json([setting._asdict() for setting in settings])
    else:
        rows = [(s.key, _text(s.value), _default_text(s.default), s.source, s.meaning) for s in settings]
        print_table(("setting", "value", "default", "from", "meaning"), rows)
    return 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _default_text(value: Any) -> str:
    return "-" if value is None else _text(value)
