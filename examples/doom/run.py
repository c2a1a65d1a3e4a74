"""Trains on ViZDoom's `basic`: the server and the games in one command.

    python examples/doom/run.py --minutes 30 --plot doom.png

The games are processes of their own that know one address. When training has ended, one more game plays without
exploration. Ctrl-C ends all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tetherl import Algorithm, Callbacks, RunConfig, TetherlError

HERE = Path(__file__).resolve().parent
GREEDY_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 20.0
REPORT_EVERY_S = 10.0


class Watch(Callbacks):
    """Prints the state of training now and then, and ends it when no game is left."""

    def __init__(self, games: list[subprocess.Popen[str]]) -> None:
        self.games = games
        self._next_line = 0.0

    def on_iteration(self, algorithm: Algorithm, metrics: dict[str, Any]) -> None:
        if (seconds := metrics["time/total_s"]) >= self._next_line:
            self._next_line = seconds + REPORT_EVERY_S
            mean = metrics["episode_return_mean"]
            print(
                f"{seconds:6.0f} s  iteration {metrics['iteration']:4d}  {metrics['env_steps']:8d} steps  "
                f"{metrics['episodes']:6d} episodes  mean return {'-' if mean is None else format(mean, '.1f')}",
                flush=True,
            )

    def on_wait(self, algorithm: Algorithm) -> None:
        if self.games and all(game.poll() is not None for game in self.games):
            algorithm.request_stop(f"all games have ended, with exit codes {[g.returncode for g in self.games]}")


def start_game(url: str, *options: str) -> subprocess.Popen[str]:
    """A game in a process group of its own: a Ctrl-C at the terminal reaches only this program."""
    command = [sys.executable, str(HERE / "client.py"), "--connect", url, "--json", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def end_games(games: list[subprocess.Popen[str]]) -> None:
    """Asks, waits, kills. With a game goes all that it started."""
    for game in games:
        if game.poll() is None:
            game.terminate()
    for game in games:
        with contextlib.suppress(subprocess.TimeoutExpired):
            game.wait(EXIT_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(game.pid, signal.SIGKILL)
        game.wait()
        if game.stdout is not None:
            game.stdout.close()


def play_greedily(url: str, episodes: int, seed: int) -> dict[str, Any]:
    """What one game reports that played without exploration; empty if it did not get to its end."""
    game = start_game(url, "--evaluate", "--episodes", str(episodes), "--seed", str(seed))
    try:
        out, _ = game.communicate(timeout=GREEDY_TIMEOUT_S)
        return dict(json.loads(out)) if game.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        return {}
    finally:
        end_games([game])


def train(config: RunConfig, games: int, greedy_episodes: int) -> dict[str, Any]:
    """Runs it all and returns what happened. The games count on from the run's seed."""
    playing: list[subprocess.Popen[str]] = []
    algorithm = Algorithm(config, Watch(playing))

    def stop(number: int, _: Any) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)  # the next one ends it at once
        algorithm.request_stop(f"stopped by {signal.Signals(number).name}")

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    greedy: dict[str, Any] = {}
    try:
        algorithm.build()
        url = algorithm.url
        assert url is not None
        print(f"{games} games play at {url}; the run is in {algorithm.run_dir.path}", flush=True)
        playing += [start_game(url, "--seed", str(config.seed + index)) for index in range(games)]
        result = algorithm.run()
        print(f"training ended: {result.reason}", flush=True)
        end_games(playing)
        if greedy_episodes and not result.reason.startswith("stopped by"):
            greedy = play_greedily(url, greedy_episodes, config.seed + games)
    finally:
        end_games(playing)
        algorithm.close()
    curve = [
        {"seconds": m["time/total_s"], "env_steps": m["env_steps"], "episode_return_mean": m["episode_return_mean"]}
        for m in algorithm.run_dir.metrics.read()
    ]
    return {
        "run": str(algorithm.run_dir.path),
        "ended": result.reason,
        "games": games,
        "episode_return_mean": curve[-1]["episode_return_mean"] if curve else None,
        "greedy": greedy,
        "curve": curve,
    }


def plot(facts: dict[str, Any], path: str) -> None:
    """The mean return of the last 100 episodes over env steps, with the minutes on top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [p for p in facts["curve"] if p["episode_return_mean"] is not None]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=100)
    axes.plot([p["env_steps"] for p in points], [p["episode_return_mean"] for p in points])
    axes.set_xlabel("env steps (decisions of the policy)")
    axes.set_ylabel("return, mean of 100 episodes")
    minutes = points[-1]["seconds"] / 60 if points else 0.0
    axes.set_title(f"ViZDoom basic, {facts['games']} external games, {minutes:.0f} minutes", fontsize=10)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """0: trained (to its end or until Ctrl-C); 1: an error; 2: a wrong setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--config", default=str(HERE / "basic.yaml"), metavar="FILE", help="(default: basic.yaml)")
    parser.add_argument("--games", type=int, default=4, help="game processes (%(default)s)")
    parser.add_argument("--minutes", type=float, help="train at most so long (default: as the file says)")
    parser.add_argument(
        "--greedy", type=int, default=50, metavar="N", help="unexplored episodes at the end (%(default)s)"
    )
    parser.add_argument("--runs-dir", default="runs", help="where the run directory goes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the run and, counted on, of the games (%(default)s)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the learning curve")
    parser.add_argument("--json", metavar="FILE", help="write the learning curve and the results")
    args = parser.parse_args()

    settings = [f"runs_dir={json.dumps(args.runs_dir)}", f"seed={args.seed}"]
    settings.append(f"name={Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    settings += ["external.port=0", "external.worker_port=0"]  # any free ones: never in another run's way
    if args.minutes is not None:
        settings.append(f"stop.time_s={60 * args.minutes}")
    try:
        facts = train(RunConfig.load(args.config, [*settings, *args.settings]), args.games, args.greedy)
    except TetherlError as error:
        print(f"doom: {error}", file=sys.stderr)
        return 1
    mean, greedy = facts["episode_return_mean"], facts["greedy"].get("episode_return_mean")
    print(f"mean return of the last 100 episodes: {'-' if mean is None else format(mean, '.1f')}")
    if greedy is not None:
        print(f"mean return of {args.greedy} episodes without exploration: {greedy:.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(facts, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
