# ruff: noqa: T201
"""`tetherl demo`: the whole thing on this machine. Five games that step themselves train one policy."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

CLIENTS = 5
TARGET_RETURN = 400
TIME_LIMIT_S = 120
GREEDY_EPISODES = 20
PASS_RETURN = 450
CLIENT_EXIT_TIMEOUT_S = 20.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="the whole thing in a minute or two, on this machine",
        description=f"Starts training with two rollout workers and {CLIENTS} client processes that play CartPole-v1 "
        f"through the front door; trains until the mean return of the last 100 episodes is {TARGET_RETURN} or "
        f"{TIME_LIMIT_S} s have passed, then evaluates {GREEDY_EPISODES} greedy episodes.",
    )
    parser.add_argument("--runs-dir", default="runs", help="where the run directory goes (default: runs)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def demo_config(runs_dir: str) -> dict[str, Any]:
    """The configuration of the demo. Any free port, so that a demo never meets another server."""
    return {
        "name": f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
        "runs_dir": runs_dir,
        "external": {
            "observation_space": {
                "type": "Box",
                "low": [-4.8, "-inf", -0.42, "-inf"],
                "high": [4.8, "inf", 0.42, "inf"],
                "shape": [4],
                "dtype": "float32",
            },
            "action_space": {"type": "Discrete", "n": 2},
            "port": 0,
            "worker_port": 0,
            "during_learning": "keep",
        },
        "algorithm": {
            "gamma": 0.98,
            "train_batch_size": 1024,
            "minibatch_size": 128,
            "epochs": 4,
            "lr": 1.0e-3,
            "entropy_coeff": 0.0,
            "use_kl_loss": False,
            "normalize_values": False,
        },
        "rollouts": {"workers": 2, "fragment_length": 64},
        "evaluation": {"workers": 1, "interval": 20, "episodes": 10, "env": "CartPole-v1"},
        "checkpoint": {"interval": "20s"},
        "stop": {"episode_return_mean": TARGET_RETURN, "time_s": TIME_LIMIT_S},
    }


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    from tetherl.algorithm import Algorithm
    from tetherl.cli.common import print_json
    from tetherl.cli.progress import Progress
    from tetherl.cli.train import stop_on_signals
    from tetherl.config import RunConfig

    progress = Progress()
    algorithm = Algorithm(RunConfig.from_dict(demo_config(args.runs_dir)), progress)
    clients: list[subprocess.Popen[str]] = []
    with stop_on_signals(algorithm):
        try:
            progress.say("tetherl demo: two rollout workers serve five games that step themselves.\n")
            progress.say("starting the processes ...")
            algorithm.build()
            progress.say(_plan_text(algorithm.plan))
            for warning in algorithm.plan.warnings:
                progress.say(f"note: {warning}")
            assert algorithm.url is not None
            clients = [_start_client(algorithm.url, seed) for seed in range(CLIENTS)]
            progress.say(f"\n{CLIENTS} clients play CartPole-v1; all they know is {algorithm.url}\n")
            progress.start()
            result = algorithm.run()
            progress.stop()
            progress.say(f"training ended: {result.reason}")
            sessions = algorithm.tracker.peak_clients
            algorithm.announce("stopped")
            played = [_client_facts(client) for client in clients]
            evaluation = algorithm.evaluate(GREEDY_EPISODES)
            facts = _facts(algorithm, result.reason, evaluation.returns, played, sessions)
        finally:
            progress.stop()
            algorithm.close()
            for client in clients:
                _end(client)
    facts["seconds"] = round(time.monotonic() - started, 1)
    if args.json:
        print_json(facts)
    else:
        _report(facts)
    for problem in facts["problems"]:
        print(f"demo: {problem}", file=sys.stderr)
    return 1 if facts["problems"] else 0


def _plan_text(plan: Any) -> str:
    """The resource plan in plain columns, with what each process does."""
    lines = [f"{'role':<12}{'processes':>10}{'CPUs each':>11}{'GPUs each':>11}   what it does"]
    for row in plan.rows:
        lines.append(f"{row.role:<12}{row.count:>10}{row.cpus:>11g}{row.gpus:>11g}   {row.what}")
    lines.append(f"{'total':<12}{sum(r.count for r in plan.rows):>10}{plan.total.cpus:>11g}{plan.total.gpus:>11g}")
    return "\n".join(lines)


def _start_client(url: str, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tetherl", "client", "--env", "CartPole-v1", "--connect", url]
    command += ["--envs", "1", "--seed", str(seed), "--json", "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _client_facts(client: subprocess.Popen[str]) -> dict[str, Any]:
    """What a client has to say at its end, and its exit code."""
    try:
        out, _ = client.communicate(timeout=CLIENT_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"exit_code": None}
    facts: dict[str, Any] = json.loads(out) if out.strip() else {}
    return {**facts, "exit_code": client.returncode}


def _end(client: subprocess.Popen[str]) -> None:
    if client.poll() is None:
        client.send_signal(signal.SIGTERM)
        try:
            client.wait(5)
        except subprocess.TimeoutExpired:
            client.kill()
            client.wait()
    if client.stdout is not None:
        client.stdout.close()


def _facts(
    algorithm: Any,
    reason: str,
    returns: list[float],
    played: list[dict[str, Any]],
    sessions: dict[int, int],
) -> dict[str, Any]:
    """Everything the demo reports, as one document."""
    from tetherl.runs.directory import RunDirectory

    history = RunDirectory.read(algorithm.config.runs_dir, algorithm.config.name).metrics.read()
    last = history[-1] if history else {}
    books = algorithm.queue.snapshot()
    fates = algorithm.queue.learning_fates
    lags = [m["lag/mean"] for m in history if m.get("lag/mean") is not None]
    trained = max(1, sum(books["trained_by_worker"].values()))
    learning = {
        "seconds": round(sum(m["time/learn_s"] for m in history), 1),
        "steps_arrived": books["received_learning"],
        "trained": fates.trained,
        "dropped": {k: v for k, v in sorted(fates.dropped.items()) if v},
        "actions_answered": sum(p.get("actions_while_learning", 0) for p in played),
        "longest_action_wait_s": max((p.get("longest_wait_s", 0.0) for p in played), default=0.0),
        "lag_mean": sum(lags) / len(lags) if lags else None,
        "lag_max": max((m.get("lag/max") or 0 for m in history), default=None),
        "queue_peak_bytes": algorithm.queue.peak_bytes,
        "queue_max_bytes": algorithm.queue.max_bytes,
    }
    learning["pending"] = learning["steps_arrived"] - learning["trained"] - sum(learning["dropped"].values())
    document = {
        "run": algorithm.config.name,
        "path": str(algorithm.run_dir.path),
        "ended": reason,
        "plan": algorithm.plan.to_dict(),
        "iterations": algorithm.iteration,
        "curve": [
            {
                "seconds": m["time/total_s"],
                "env_steps": m["env_steps"],
                "episode_return_mean": m["episode_return_mean"],
            }
            for m in history
        ],
        "episode_return_mean": last.get("episode_return_mean"),
        "evaluation": {
            "episodes": len(returns),
            "episode_return_mean": sum(returns) / len(returns),
            "episode_return_min": min(returns),
            "returns": returns,
        },
        "steps": {
            "received": books["received"],
            "trained": books["trained"],
            "dropped": books["dropped"],
            "pending": books["pending"],
            "balanced": books["balanced"],
        },
        "while_learning": learning,
        "workers": [
            {
                "worker": w,
                "clients": sessions.get(w, 0),
                "share": books["trained_by_worker"].get(w, 0) / trained,
            }
            for w in sorted(algorithm.rollouts.workers)
        ],
        "clients": played,
    }
    document["problems"] = _problems(document)
    return document


def _problems(facts: dict[str, Any]) -> list[str]:
    """Why the demo failed, if it did."""
    problems = []
    steps = facts["steps"]
    mean = facts["evaluation"]["episode_return_mean"]
    if mean < PASS_RETURN:
        problems.append(f"the greedy return is {mean:.1f}, expected at least {PASS_RETURN}")
    total = steps["trained"] + sum(steps["dropped"].values()) + steps["pending"]
    if steps["received"] != total or not steps["balanced"]:
        problems.append(f"the books do not balance: received {steps['received']}, accounted for {total}")
    bad = [p["exit_code"] for p in facts["clients"] if p["exit_code"] != 0]
    if bad:
        problems.append(f"{len(bad)} of {CLIENTS} clients did not end well: exit codes {bad}")
    if facts["while_learning"]["queue_peak_bytes"] > facts["while_learning"]["queue_max_bytes"]:
        problems.append("the sample queue grew over its bound")
    return problems


def _report(facts: dict[str, Any]) -> None:
    """The same for people."""
    learning, steps = facts["while_learning"], facts["steps"]
    print("\nReturn over time (mean of the last 100 episodes)")
    for point in _thin(facts["curve"], 8):
        value = point["episode_return_mean"] or 0.0
        print(f"  {point['seconds']:6.1f} s  {point['env_steps']:7d} steps  {value:6.1f}  {'#' * int(value / 10)}")
    evaluation = facts["evaluation"]
    print(
        f"\nGreedy evaluation, {evaluation['episodes']} episodes in the evaluation worker: "
        f"mean {evaluation['episode_return_mean']:.1f}, lowest {evaluation['episode_return_min']:.0f}"
    )
    print("\nWorkers")
    for worker in facts["workers"]:
        print(
            f"  rollout worker {worker['worker']}: {worker['clients']} clients, "
            f"{100 * worker['share']:.1f} % of the trained steps"
        )
    dropped = ", ".join(f"{n} {reason}" for reason, n in learning["dropped"].items()) or "none dropped"
    print(f"\nWhile the learner learned ({learning['seconds']} s in all, fate: keep)")
    print(
        f"  {learning['steps_arrived']} steps arrived: {learning['trained']} trained later, {dropped}, "
        f"{learning['pending']} pending"
    )
    print(
        f"  {learning['actions_answered']} actions were answered meanwhile; "
        f"the longest wait for an action was {1000 * learning['longest_action_wait_s']:.0f} ms"
    )
    print(f"  lag of trained steps: mean {learning['lag_mean'] or 0:.2f}, max {learning['lag_max'] or 0:.0f} versions")
    print(f"  sample queue: peak {learning['queue_peak_bytes']:,} of {learning['queue_max_bytes']:,} bytes")
    reasons = ", ".join(f"{reason} {n}" for reason, n in steps["dropped"].items()) or "none"
    print("\nEvery step is accounted for")
    print(
        f"  received {steps['received']} = trained {steps['trained']} + dropped {sum(steps['dropped'].values())} "
        f"({reasons}) + pending {steps['pending']}"
    )
    verdict = "failed" if facts["problems"] else "all well"
    print(f"\n{verdict} after {facts['seconds']:.0f} s; the run is in {facts['path']}")
    print("\nTry next")
    print(f"  tetherl evaluate {facts['path']} --env CartPole-v1 --episodes 100")
    print("  tetherl train examples/cartpole/ppo.yaml")
    print("  tetherl plan examples/doom/doom.yaml")


def _thin(points: list[Any], count: int) -> list[Any]:
    """About `count` of the points, always the last."""
    step = max(1, len(points) // count)
    return points[::-1][::step][::-1]
