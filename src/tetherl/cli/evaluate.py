"""`tetherl evaluate`: episodes with a trained policy."""

from __future__ import annotations

import argparse
import sys

from tetherl.cli.common import positive, print_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="episodes without exploration; table and JSON",
        description="Play episodes with a trained policy and report the returns. Nothing is trained.",
    )
    parser.add_argument("run", metavar="RUN", help="name of a run, or the path of its directory")
    parser.add_argument("--checkpoint", default="latest", help="latest, best, or an iteration (default: latest)")
    parser.add_argument("--episodes", type=positive, default=20, help="episodes to play (default: 20)")
    parser.add_argument("--explore", action="store_true", help="sample actions instead of the most probable ones")
    parser.add_argument("--env", help="environment to play instead of the run's own")
    parser.add_argument("--runs-dir", default="runs", help="where runs are (default: runs)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    from tetherl.config import RunConfig
    from tetherl.errors import CheckpointError, ConfigError
    from tetherl.runs.directory import RunDirectory

    directory = RunDirectory.find(args.run, args.runs_dir)
    config = RunConfig.from_dict(directory.read_config())
    which = int(args.checkpoint) if args.checkpoint.isdigit() else args.checkpoint
    checkpoint = directory.checkpoints.load(which)
    env, env_config = config.env, config.env_config
    if config.evaluation.env is not None:
        env, env_config = config.evaluation.env, config.evaluation.env_config
    if args.env is not None:
        env, env_config = args.env, {}
    if env is None:
        raise ConfigError(
            "this run was trained by external clients and names no evaluation.env: add --env ID, the Gymnasium "
            "environment to play"
        )

    import numpy as np

    from tetherl.algorithms.export import policy_weights
    from tetherl.workers.evaluator import Evaluator
    from tetherl.workers.spec import WorkerSpec

    spec = WorkerSpec(
        index=1,
        seed=config.seed,
        model=config.model,
        env=env,
        env_config=env_config,
        envs=min(8, args.episodes),
    )
    evaluator = Evaluator(spec)
    try:
        try:
            evaluator.set_weights(policy_weights(checkpoint.arrays), int(checkpoint.state["version"]))
        except CheckpointError as error:
            raise CheckpointError(
                f"the policy of run {directory.name!r} does not fit environment {env}: it was trained in another one, "
                f"with other observations or actions ({error})"
            ) from error
        result = evaluator.evaluate(args.episodes, args.explore)
    finally:
        evaluator.close()
    returns = result.returns
    document = {
        "run": directory.name,
        "checkpoint": checkpoint.iteration,
        "explore": args.explore,
        "episodes": len(returns),
        "episode_return_mean": float(np.mean(returns)),
        "episode_return_min": min(returns),
        "episode_return_max": max(returns),
        "episode_length_mean": float(np.mean(result.lengths)),
        "returns": returns,
        "lengths": result.lengths,
    }
    if args.json:
        print_json(document)
        return 0
    from rich.console import Console
    from rich.table import Table

    title = f"{directory.name}, checkpoint {checkpoint.iteration}, {'sampled' if args.explore else 'greedy'} actions"
    table = Table("episodes", "return: mean", "min", "max", "length: mean", title=title)
    table.add_row(
        str(len(returns)),
        f"{np.mean(returns):.1f}",
        f"{min(returns):.1f}",
        f"{max(returns):.1f}",
        f"{np.mean(result.lengths):.1f}",
    )
    Console(file=sys.stdout).print(table)
    return 0
