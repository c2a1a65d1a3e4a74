"""How fast one rollout worker answers clients, next to a bare WebSocket server on the same machine.

    python benchmarks/serving.py [--seconds 3] [--rounds 3] [--json] [--write]

In each round every row is measured twice, one right after the other: with a bare server of the same library
(aiohttp) that answers every message with the same bytes, and with a rollout worker that checks, infers, records and
hands the steps on. Each server has its own process; both get the same messages from the same client program.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import common
import load
import numpy as np
import psutil
from gymnasium import spaces

from tetherl.data.queue import SampleQueue
from tetherl.engine import LocalEngine
from tetherl.models.config import ModelConfig
from tetherl.models.policy import Policy
from tetherl.server.config import ExternalConfig
from tetherl.spaces import space_to_spec
from tetherl.workers.group import RolloutGroup
from tetherl.workers.serving import ServingWorker
from tetherl.workers.spec import WorkerSpec

CARTPOLE, FRAME = "CartPole, 64×64 network", "240×320 frame, no network"
CLIENTS_PER_PROCESS = 8
START_S = 120.0
QUEUE_BYTES = 64 << 20
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Game:
    """What clients send, and the network that answers; `network=False`: none, always the same action."""

    name: str
    observation_space: spaces.Box
    action_space: spaces.Space
    model: ModelConfig
    observation: np.ndarray
    network: bool = True


@dataclass
class Row:
    """One line of a table."""

    game: str
    clients: int
    client: str = "load"
    bare: list[dict[str, float]] = field(default_factory=list)
    ours: list[dict[str, float]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        bare, ours = _medians(self.bare), _medians(self.ours)
        ratio = ours["requests_per_s"] / bare["requests_per_s"] if bare else None
        return {"game": self.game, "clients": self.clients, "client": self.client, "bare": bare, "ours": ours} | {
            "ratio": ratio
        }


def games() -> list[Game]:
    bounds = np.array([4.8, np.inf, 0.42, np.inf], np.float32)
    cartpole = Game(
        CARTPOLE,
        spaces.Box(-bounds, bounds),
        spaces.Discrete(2),
        ModelConfig(fcnet_hiddens=[64, 64]),
        np.array([0.01, -0.2, 0.03, 0.4], np.float32),
    )
    # A network that sees images costs far more than the way of an image through the server, which is measured here.
    frame = Game(
        FRAME,
        spaces.Box(0, 255, (240, 320), np.uint8),
        spaces.Discrete(2),
        ModelConfig(conv_filters=[[1, [16, 16], 16]]),
        np.random.default_rng(0).integers(0, 256, (240, 320)).astype(np.uint8),
        network=False,
    )
    return [cartpole, frame]


def rows() -> list[Row]:
    found = [Row(CARTPOLE, n) for n in (1, 4, 16)]
    found.append(Row(CARTPOLE, 1, "PolicyClient"))
    return found + [Row(FRAME, n) for n in (1, 4)]


class Servers:
    """A bare server, one rollout worker per game, and the processes of the clients."""

    def __init__(self, engine: LocalEngine) -> None:
        most = math.ceil(max(row.clients for row in rows()) / CLIENTS_PER_PROCESS)
        self._load = [engine.start(load.LoadClient, name=f"load clients {i}", env=ONE_THREAD) for i in range(most)]
        self._real = engine.start(load.RealClient, name="client", env=ONE_THREAD)
        self._bare = engine.start(load.BareServer, name="bare server", env=ONE_THREAD)
        self._games = {game.name: game for game in games()}
        self._workers: dict[str, Any] = {
            name: engine.start(
                ServingWorker if game.network else load.worker_without_network,
                _spec(game),
                None,
                name=f"rollout worker ({name})",
                max_concurrency=4,
                env=ONE_THREAD,
            )
            for name, game in self._games.items()
        }
        for name, worker in self._workers.items():
            game = self._games[name]
            policy = Policy(game.observation_space, game.action_space, game.model)
            worker.call("set_weights", policy.weights(), 1).result(START_S)
        # The algorithm's side of a run, without the algorithm: steps are fetched and then forgotten.
        self._groups = [
            RolloutGroup({1: worker}, SampleQueue(QUEUE_BYTES), lambda sample: None)
            for worker in self._workers.values()
        ]
        for group in self._groups:
            group.start_serving()

    def stop(self) -> None:
        for group in self._groups:
            group.stop_serving()

    def measure(self, row: Row, *, bare: bool, seconds: float) -> dict[str, float]:
        """One measurement: requests per second, latencies, and the server's CPU time per request."""
        server = self._bare if bare else self._workers[row.game]
        url = server.call("url").result(START_S)
        observation = self._games[row.game].observation
        pools = [self._real] if row.client == "PolicyClient" else self._load
        count = math.ceil(row.clients / CLIENTS_PER_PROCESS)
        share = [row.clients // count] * count
        for pool in pools[:count]:
            pool.ready.result(START_S)
        start_at = time.monotonic() + 0.25
        assert server.pid is not None
        process = psutil.Process(server.pid)
        cpu = common.cpu_seconds(process)
        calls = [
            pool.call("run", url, n, observation, seconds, start_at)
            for pool, n in zip(pools[:count], share, strict=True)
        ]
        results = [call.result(START_S + seconds) for call in calls]
        cpu = common.cpu_seconds(process) - cpu
        latencies = np.concatenate([found for found, _ in results])
        return {
            "requests_per_s": sum(len(found) / passed for found, passed in results),
            "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
            "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
            "server_cpu_us": cpu / len(latencies) * 1e6,
        }


def _spec(game: Game) -> WorkerSpec:
    external = ExternalConfig(
        observation_space=space_to_spec(game.observation_space),
        action_space=space_to_spec(game.action_space),
        worker_port=0,
    )
    return WorkerSpec(index=1, seed=0, model=game.model, external=external)


@contextmanager
def servers() -> Iterator[Servers]:
    engine = LocalEngine()
    try:
        running = Servers(engine)
        yield running
        running.stop()
    finally:
        engine.close()


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """All rows, `rounds` times; medians."""
    found = rows()
    with servers() as running:
        for row in found:  # the first requests to a process are slow
            for bare in (True, False):
                if not (bare and row.client == "PolicyClient"):
                    running.measure(row, bare=bare, seconds=min(seconds, 0.5))
        conditions = common.Conditions()
        for number in range(1, rounds + 1):
            common.say(f"serving: round {number} of {rounds}")
            for row in found:
                if row.client != "PolicyClient":  # it does not talk to a server that is none of ours
                    row.bare.append(running.measure(row, bare=True, seconds=seconds))
                row.ours.append(running.measure(row, bare=False, seconds=seconds))
        facts = conditions.facts()
    return {"benchmark": "serving", **facts, "rows": [row.document() for row in found]}


def _medians(results: list[dict[str, float]]) -> dict[str, float]:
    return {key: common.median([r[key] for r in results]) for key in results[0]} if results else {}


def tables(document: dict[str, Any]) -> str:
    header = ["observation", "clients", "requests/s", "bare", "ratio", "p50 / p99 ms", "bare", "server CPU µs", "bare"]
    lines = []
    for row in document["rows"]:
        bare, ours = row["bare"], row["ours"]
        clients = f"{row['clients']}" if row["client"] == "load" else f"{row['clients']} ({row['client']})"
        lines.append(
            [
                row["game"],
                clients,
                f"{ours['requests_per_s']:,.0f}",
                f"{bare['requests_per_s']:,.0f}" if bare else "",
                f"{row['ratio']:.2f}" if bare else "",
                f"{ours['p50_ms']:.2f} / {ours['p99_ms']:.2f}",
                f"{bare['p50_ms']:.2f} / {bare['p99_ms']:.2f}" if bare else "",
                f"{ours['server_cpu_us']:.0f}",
                f"{bare['server_cpu_us']:.0f}" if bare else "",
            ]
        )
    return common.table(header, lines)


def main() -> int:
    options = common.parser("Requests per second of one rollout worker, next to a bare server.", seconds=3).parse_args()
    return common.main("serving", options, lambda: measure(options.seconds, options.rounds), tables)


if __name__ == "__main__":
    sys.exit(main())
