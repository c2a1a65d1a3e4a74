# ruff: noqa: T201
"""The `tetherl` command: thin commands around the library.

Each command is a module with `add_parser(commands)` and `run(args) -> exit code`; only the one that is called
is imported, so that `tetherl client` works with nothing but the client installed.

Exit codes: 0 well (also a run that Ctrl-C or SIGTERM stopped with its checkpoint), 1 failed, 2 bad configuration or
arguments, 3 the plan does not fit, 130 ended at once by Ctrl-C (for `train`: by the second).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence

from tetherl import __version__
from tetherl.errors import ConfigError, MissingExtraError, PlanError, TetherlError

COMMANDS = ("train", "plan", "client", "evaluate", "plot", "config", "demo")

EXTRAS = {
    **dict.fromkeys(("torch", "gymnasium", "aiohttp", "safetensors", "yaml", "rich", "psutil"), "train"),
    "cloudpickle": "train",
    "ray": "ray",
    "matplotlib": "plot",
    **dict.fromkeys(("vizdoom", "minigrid"), "examples"),
}
"""Module -> the extra that brings it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv: without the program's name; default: the process's own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # "module:Name" may name a file of the user's, as with python -m
    command = next((word for word in arguments if not word.startswith("-")), "")
    as_json = "--json" in arguments
    try:
        args = _parse(arguments, [command] if command in COMMANDS else COMMANDS)
        with _results_only() if as_json else contextlib.nullcontext():
            code: int = importlib.import_module(f"tetherl.cli.{args.command}").run(args)
        return code
    except SystemExit as end:  # from argparse, which has said why
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        return _fail(MissingExtraError(f"tetherl {command}".strip(), EXTRAS[missing]), as_json)
    except TetherlError as error:
        return _fail(error, as_json)


def _fail(error: TetherlError, as_json: bool) -> int:
    print(f"tetherl: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
    return 3 if isinstance(error, PlanError) else 2 if isinstance(error, ConfigError) else 1


def _parse(arguments: Sequence[str], commands: Sequence[str]) -> argparse.Namespace:
    """Arguments; settings may stand before, between and behind the options."""
    parser = _parser(commands)
    args, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(args, "settings") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.settings = [*args.settings, *rest]
    return args


def _parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tetherl",
        description="Reinforcement-learning training for programs that the trainer does not step itself.",
    )
    parser.add_argument("--version", action="version", version=f"tetherl {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in commands:
        importlib.import_module(f"tetherl.cli.{name}").add_parser(subparsers)
    return parser


@contextlib.contextmanager
def _results_only() -> Iterator[None]:
    """With --json: what libraries and started processes write to stdout goes to stderr instead.

    `print` still reaches the real stdout. Does nothing where stdout is no file of the system, as in a test.
    """
    try:
        on_terminal = sys.stdout.fileno() == 1
    except (OSError, ValueError, AttributeError):
        on_terminal = False
    if not on_terminal:
        yield
        return
    before = sys.stdout
    before.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(os.dup(real), "w", encoding=before.encoding)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()
        sys.stdout = before
        os.dup2(real, 1)
        os.close(real)
