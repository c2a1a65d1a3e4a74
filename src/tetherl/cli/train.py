# ruff: noqa: T201
"""`tetherl train`: run or resume training."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from tetherl.cli.common import add_config_arguments, load_config, nested, print_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="run (or resume) training",
        description="Train a policy. The run's name is its identity: the same name resumes from its latest checkpoint.",
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = load_config(args)
    from tetherl.algorithm import Algorithm
    from tetherl.cli.progress import Progress

    progress = Progress()
    algorithm = Algorithm(config, progress)
    with stop_on_signals(algorithm):
        try:
            algorithm.build()
            for warning in algorithm.plan.warnings:
                progress.say(f"warning: {warning}")
            resumed = algorithm.resumed
            if resumed is not None and algorithm.running:
                progress.say(f"resumed from {resumed.path} (iteration {resumed.iteration})")
                for change in resumed.changed:
                    progress.say(f"changed since that checkpoint: {change}")
            if algorithm.url is not None:
                progress.say(f"clients connect to {algorithm.url}")
            progress.start()
            result = algorithm.run()
        finally:
            progress.stop()
            algorithm.close()
    path = algorithm.run_dir.path
    if result.already_finished:
        progress.say(f"run {path.name!r} is finished already ({result.reason}); raise the limit to go on")
    else:
        progress.say(f"run {path.name!r} ended: {result.reason}; checkpoints and metrics are in {path}")
    document = {
        "name": path.name,
        "path": str(path),
        "reason": result.reason,
        "already_finished": result.already_finished,
        "resumed_from": str(algorithm.resumed.path) if algorithm.resumed is not None else None,
        **nested(result.metrics),
    }
    if args.json:
        print_json(document)
    elif result.metrics:
        mean = result.metrics.get("episode_return_mean")
        print(
            f"{path.name}: {algorithm.iteration} iterations, {result.metrics['env_steps']} env steps, "
            f"mean return {'-' if mean is None else format(mean, '.1f')}"
        )
    return 0


class stop_on_signals:
    """Ctrl-C and SIGTERM end the run at the next safe point, with a checkpoint; a second one ends it at once."""

    def __init__(self, algorithm: object) -> None:
        self._algorithm = algorithm
        self._previous: dict[int, object] = {}
        self._asked = False

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        name = signal.Signals(number).name
        print(f"{name}: stopping at the next safe point; once more to stop at once", file=sys.stderr)
        self._algorithm.request_stop(f"stopped by {name}")  # type: ignore[attr-defined]
