"""One process per run, and no stale lock after any kind of death."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from tetherl.errors import RunError
from tetherl.runs import RunDirectory

DEADLINE = 120.0

HOLDER = """
import subprocess, sys, time
from tetherl.runs import RunDirectory
run = RunDirectory.open(sys.argv[1], "doom")
# A worker process that outlives its driver must not keep the run.
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], stdout=subprocess.DEVNULL)
print(worker.pid, flush=True)
time.sleep(300)
"""


def test_second_opening_in_one_process_is_refused_until_close(tmp_path):
    run = RunDirectory.open(tmp_path, "doom")
    with pytest.raises(RunError, match=f"in use by this very process \\(pid {os.getpid()}"):
        RunDirectory.open(tmp_path, "doom")
    RunDirectory.open(tmp_path, "another").close()
    run.close()
    run.close()
    RunDirectory.open(tmp_path, "doom").close()


def test_failed_opening_gives_the_lock_back(tmp_path):
    (tmp_path / "doom").mkdir()
    (tmp_path / "doom" / "checkpoints").write_text("a file in the way")
    with pytest.raises(RunError, match="checkpoints"):
        RunDirectory.open(tmp_path, "doom")
    (tmp_path / "doom" / "checkpoints").unlink()
    RunDirectory.open(tmp_path, "doom").close()


def test_lock_left_by_a_dead_process_is_no_obstacle(tmp_path):
    (tmp_path / "doom").mkdir()
    (tmp_path / "doom" / "lock").write_text('{"pid": 1, "host": "elsewhere", "since": "2026-01-01"}')
    with RunDirectory.open(tmp_path, "doom"):
        with pytest.raises(RunError, match="this very process"):
            RunDirectory.open(tmp_path, "doom")


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_another_process_is_named_and_its_kill_frees_the_run(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = None
    try:
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE)
        assert ready
        worker = int(process.stdout.readline())
        with pytest.raises(RunError, match=rf"doom is in use by process {process.pid} on .*another name"):
            RunDirectory.open(tmp_path, "doom")
        assert RunDirectory.read(tmp_path, "doom").existed  # looking is allowed

        process.kill()
        process.wait(DEADLINE)
        os.kill(worker, 0)  # its worker still lives
        with RunDirectory.open(tmp_path, "doom") as run:
            run.metrics.append({"iteration": 1})
    finally:
        process.kill()
        process.communicate()
        if worker is not None:
            os.kill(worker, signal.SIGKILL)
