"""Kill -9 the algorithm process in mid-run; the same command goes on from the latest complete checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest
import yaml


@pytest.fixture
def trainer(tmp_path, kit):
    """Starts `tetherl train` on fixed ports, as a user would."""
    door, worker = kit.free_ports(2)
    config = kit.external(
        tmp_path,
        external={"port": door, "worker_port": worker},
        checkpoint={"interval": 1, "keep": 3},
        stop={"iterations": 100000},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    running = []

    def start(*more: str) -> subprocess.Popen:
        log = open(tmp_path / f"train{len(running)}.log", "w")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "tetherl", "train", str(tmp_path / "run.yaml"), *more], stdout=log, stderr=log
        )
        log.close()
        running.append(process)
        return process

    start.url = f"ws://127.0.0.1:{door}"
    start.directory = tmp_path / "runs" / "run"
    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()


def iterations(directory) -> list[int]:
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line)["iteration"])
        except json.JSONDecodeError:
            continue
    return found


def test_kill_9_then_the_same_command_goes_on_and_clients_come_back(tmp_path, clients, kit, trainer):
    first = trainer()
    clients.start(trainer.url, 2)  # before the server is up: they wait for it (case C026)
    kit.wait_for("three iterations", lambda: max(iterations(trainer.directory), default=0) >= 3)
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kit.wait_for("the workers to end with their parent", lambda: not any(c.is_running() for c in children), 60)

    second = trainer()
    log = tmp_path / "train1.log"
    kit.wait_for("the resume message", lambda: log.exists() and "resumed from" in log.read_text())
    resumed_at = next(
        e["iteration"]
        for e in map(json.loads, (trainer.directory / "events.jsonl").read_text().splitlines())
        if e["kind"] == "resumed"
    )
    assert resumed_at >= 2
    kit.wait_for("more iterations", lambda: max(iterations(trainer.directory), default=0) >= resumed_at + 3)

    def came_back() -> bool:
        lines = (trainer.directory / "events.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["kind"] for line in lines if line.endswith("}")]
        return kinds[kinds.index("resumed") :].count("client_joined") == 2

    kit.wait_for("both clients to come back by themselves", came_back)
    second.send_signal(signal.SIGTERM)
    assert second.wait(kit.deadline_s) == 0, log.read_text()
    played = clients.results()
    assert [c["exit_code"] for c in played] == [0, 0]
    found = iterations(trainer.directory)
    assert found == list(range(1, len(found) + 1)), "no iteration twice, none missing"
    last = json.loads((trainer.directory / "metrics.jsonl").read_text().splitlines()[-1])
    dropped = {k.rpartition("/")[2]: v for k, v in last.items() if k.startswith("steps/dropped/")}
    assert last["steps/received"] == last["steps/trained"] + sum(dropped.values()) + last["steps/pending"]
    checkpoints = sorted(p.name for p in (trainer.directory / "checkpoints").iterdir())
    assert f"{found[-1]:06d}" in checkpoints, "SIGTERM saves the last iteration (case C097)"


def test_two_processes_cannot_train_one_run(tmp_path, kit, trainer):
    trainer()
    kit.wait_for("the first to start", (trainer.directory / "events.jsonl").exists)
    second = trainer("external.port=0", "external.worker_port=0")
    assert second.wait(kit.deadline_s) == 1
    assert "in use by process" in (tmp_path / "train1.log").read_text()
