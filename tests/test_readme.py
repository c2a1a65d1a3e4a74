"""The programs of the README run as they stand there (on other ports, so that nothing else is in the way)."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEADLINE_S = 240


def programs() -> tuple[str, str]:
    training, client = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return training, client


def test_both_programs_have_fifteen_lines_or_fewer():
    for program in programs():
        assert len([line for line in program.splitlines() if line.strip()]) <= 15


def test_both_programs_work_together(tmp_path):
    training, client = programs()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    training = training.replace("    external={", f'    external={{"port": {port}, "worker_port": 0,')
    client = client.replace("9900", str(port))
    (tmp_path / "training.py").write_text(training)
    (tmp_path / "client.py").write_text(client)
    server = subprocess.Popen([sys.executable, "training.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    player = subprocess.Popen([sys.executable, "client.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = server.communicate(timeout=DEADLINE_S)
        player.communicate(timeout=DEADLINE_S)
    finally:
        for process in (server, player):
            process.kill()
            process.wait()
    assert server.returncode == 0 and player.returncode == 0
    reason, _, mean = out.splitlines()[-1].rpartition(" ")
    assert reason == "stop.iterations: 20 of 20"
    assert float(mean) > 7.0, "guessing gives 5 of 10"


def test_every_folder_of_the_table_exists():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"`(src/tetherl/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
    for target in re.findall(r"\]\(([\w./]+)\)", text):
        assert (ROOT / target).exists(), target
