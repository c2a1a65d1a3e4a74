# ruff: noqa: T201
"""What several commands share: configuration arguments, nested documents, tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tetherl.errors import ConfigError

if TYPE_CHECKING:
    from tetherl.config import RunConfig


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG.yaml, key=value ..., --env and --json."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="CONFIG.yaml key=value",
        help="a configuration file, and settings that win over it, such as algorithm.lr=1e-3",
    )
    parser.add_argument("--env", metavar="ID", help="Gymnasium environment, for a quick start without a file")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def load_config(args: argparse.Namespace, more: Sequence[str] = ()) -> RunConfig:
    """The configuration that the arguments of `add_config_arguments` name; `more` settings win over all."""
    from tetherl.config import RunConfig

    files = [word for word in args.settings if "=" not in word]
    overrides = [word for word in args.settings if "=" in word]
    if len(files) > 1:
        raise ConfigError(f"expected one configuration file and settings as key=value, got {', '.join(files)}")
    if not files and not overrides and args.env is None:
        raise ConfigError("nothing to configure: give a CONFIG.yaml, or --env ID")
    if args.env is not None:
        overrides.insert(0, f"env={json.dumps(args.env)}")
    return RunConfig.load(files[0] if files else None, [*overrides, *more])


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def nested(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys such as "steps/dropped/stale" as nested maps."""
    result: dict[str, Any] = {}
    for key, value in metrics.items():
        *parents, name = key.split("/")
        inner = result
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return result


def print_json(document: Any) -> None:
    """One JSON document on stdout; what JSON has no name for (infinity) becomes text."""
    print(json.dumps(_finite(document)), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return str(value)
    return value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people: with lines on a terminal, else plain columns that grep and cut can read."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_table(columns, rows))
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """The same as a rich table. Cells are plain text, never markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
