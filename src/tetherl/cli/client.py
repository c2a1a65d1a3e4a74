# ruff: noqa: T201
"""`tetherl client`: play Gymnasium environments as external clients."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tetherl.cli.common import positive

if TYPE_CHECKING:
    from tetherl.client.envloop import Player, PlayStats

REPORT_EVERY_S = 10.0
STOP_PATIENCE_S = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "client",
        help="play a Gymnasium environment as external client(s)",
        description="Plays a Gymnasium environment under the policy that a running training serves. The "
        "server may be started later. Ends with the server's run, after --episodes or --steps, or on Ctrl-C.",
    )
    parser.add_argument(
        "--env", required=True, metavar="ID", help="Gymnasium id, or module:Name of a class or function"
    )
    parser.add_argument("--connect", required=True, metavar="URL", help="the server, for example ws://127.0.0.1:9900")
    parser.add_argument(
        "--envs",
        type=positive,
        default=1,
        metavar="N",
        help="copies, each with its own connection (default: 1). They are threads of this process: good for "
        "a few light environments; for many or heavy ones start several clients",
    )
    parser.add_argument("--episodes", type=positive, metavar="K", help="episodes per copy (default: no end)")
    parser.add_argument("--steps", type=positive, metavar="K", help="steps per copy (default: no end)")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the first copy; copy i takes S + i")
    parser.add_argument("--evaluate", action="store_true", help="play for metrics only: nothing of it is trained on")
    parser.add_argument(
        "--env-config",
        type=_json_object,
        default={},
        metavar="JSON",
        help="settings of the environment; they override the ones that the server sends, key by key",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="file with the server's token (default: TETHERL_TOKEN, if set)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    """0: ended as asked, by a signal or with the server's run; 1: a copy failed; errors of use are raised."""
    from tetherl.client.envloop import Player

    # "module:Name" is looked for in the current directory first, as `python -m` does.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    token = _read_token(args.token_file)
    base = f"{args.env} ({os.getpid()})"
    players = [
        Player(
            args.env,
            args.connect,
            episodes=args.episodes,
            steps=args.steps,
            seed=None if args.seed is None else args.seed + index,
            token=token,
            name=base if args.envs == 1 else f"{base}/{index}",
            purpose="evaluate" if args.evaluate else "train",
            env_config=args.env_config,
        )
        for index in range(args.envs)
    ]
    errors = _run_all(players, quiet=args.quiet)
    _report(args, players, errors)
    return 1 if errors else 0


def _run_all(players: list[Player], *, quiet: bool) -> dict[int, Exception]:
    """Runs all players to their end; returns the errors by index."""
    errors: dict[int, Exception] = {}

    def work(index: int) -> None:
        try:
            players[index].run()
        except Exception as error:
            errors[index] = error

    threads = [
        threading.Thread(target=work, args=(index,), name=f"player-{index}", daemon=True)
        for index in range(len(players))
    ]
    interrupted = threading.Event()
    previous = _on_signals(interrupted)
    try:
        for thread in threads:
            thread.start()
        report_at = time.monotonic() + REPORT_EVERY_S
        while any(thread.is_alive() for thread in threads) and not interrupted.is_set():
            threads[0].join(0.1) if threads[0].is_alive() else time.sleep(0.1)
            if not quiet and time.monotonic() >= report_at:
                report_at += REPORT_EVERY_S
                print(_progress(players), file=sys.stderr, flush=True)
        if interrupted.is_set():
            for player in players:
                player.stop()
        deadline = time.monotonic() + STOP_PATIENCE_S
        for thread in threads:  # an environment that hangs in step() does not keep this command alive
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return errors


def _on_signals(interrupted: threading.Event) -> dict[int, Any]:
    """The first Ctrl-C or SIGTERM ends playing, the second the process. Returns the handlers before."""

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    return {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}


def _total(players: list[Player]) -> PlayStats:
    from tetherl.client.envloop import PlayStats

    total = PlayStats()
    for player in players:
        total.merge(player.stats)
    return total


def _report(args: argparse.Namespace, players: list[Player], errors: dict[int, Exception]) -> None:
    total = _total(players)
    for index, error in sorted(errors.items()):
        print(f"copy {index}: {type(error).__name__}: {error}", file=sys.stderr)
    if args.json:
        document = {
            "env": args.env,
            "url": args.connect,
            **total.to_dict(),
            "errors": [str(error) for _, error in sorted(errors.items())],
            "copies": [player.stats.to_dict() for player in players],
        }
        print(json.dumps(document))
        return
    print(f"{args.env} at {args.connect}: {_line(total)}")
    print(
        f"  waiting for actions: mean {1000 * total.wait_mean_s:.1f} ms, most {total.longest_wait_s:.3f} s;"
        f" {total.actions_while_learning} of {total.actions} actions came while the server learned"
    )
    lost = f"; {total.episodes_lost} episodes lost with their connection" if total.episodes_lost else ""
    print(f"  ended after {total.seconds:.1f} s: {total.ended or 'error'}{lost}")


def _progress(players: list[Player]) -> str:
    waiting = [problem for player in players if (problem := player.waiting_for) is not None]
    line = _line(_total(players))
    return f"{line}; {len(waiting)} of {len(players)} waiting for a connection: {waiting[0]}" if waiting else line


def _line(stats: PlayStats) -> str:
    mean = stats.episode_return_mean
    text = "-" if mean is None else format(mean, ".1f")
    return f"{stats.episodes} episodes, mean return {text}, {stats.steps} steps"


def _read_token(path: str | None) -> str | None:
    from tetherl.errors import ConfigError

    if path is None:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"--token-file {path!r} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"--token-file {path!r} is empty")
    return token


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object, for example '{\"size\": 3}'")
    return value
