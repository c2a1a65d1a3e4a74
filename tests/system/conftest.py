"""Whole runs with real processes and real sockets. Everything that waits has a deadline."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

DEADLINE_S = 240.0

CARTPOLE = {
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
}
FAST = {
    "train_batch_size": 256,
    "minibatch_size": 128,
    "epochs": 2,
    "lr": 1.0e-3,
    "entropy_coeff": 0.0,
    "use_kl_loss": False,
    "normalize_values": False,
}


def tetherl(*args: str, cwd: Path | None = None, timeout: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tetherl", *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
    )


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def wait_for(what: str, condition: Callable[[], Any], timeout: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"waited {timeout:.0f} s in vain for: {what}")


class Clients:
    """Client processes that play CartPole-v1; all of them are gone when the test ends."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, url: str, count: int = 1, **environment: str) -> None:
        for seed in range(count):
            command = [sys.executable, "-m", "tetherl", "client", "--env", "CartPole-v1", "--connect", url]
            command += ["--seed", str(seed), "--json", "--quiet"]
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **environment},
                )
            )

    def results(self) -> list[dict[str, Any]]:
        """Wait for all clients to end; their JSON documents with `exit_code`."""
        documents = []
        for process in self.processes:
            out, err = process.communicate(timeout=DEADLINE_S)
            document = json.loads(out) if out.strip() else {"stderr": err}
            documents.append({**document, "exit_code": process.returncode})
        return documents

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def clients() -> Iterator[Clients]:
    started = Clients()
    yield started
    started.kill()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        left = [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
        if not left:
            return
        time.sleep(0.1)
    pytest.fail(f"processes were left behind: {[' '.join(p.cmdline()) for p in left]}")


class Kit:
    """What the tests of this folder share (test modules cannot import each other)."""

    cartpole = CARTPOLE
    fast = FAST
    deadline_s = DEADLINE_S
    tetherl = staticmethod(tetherl)
    free_ports = staticmethod(free_ports)
    wait_for = staticmethod(wait_for)

    @staticmethod
    def external(tmp_path: Path, **sections: Any) -> dict[str, Any]:
        """A small external run; `external` and `algorithm` are merged with the defaults above."""
        base: dict[str, Any] = {
            "name": "run",
            "runs_dir": str(tmp_path / "runs"),
            "external": {**CARTPOLE, **sections.pop("external", {})},
            "algorithm": {**FAST, **sections.pop("algorithm", {})},
            "rollouts": {"workers": 1, "fragment_length": 32},
        }
        return {**base, **sections}


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
