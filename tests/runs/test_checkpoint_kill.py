"""Real deaths of the writing process: SIGKILL at random moments, and before each change to the disk."""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tetherl.errors import CheckpointError
from tetherl.runs import CheckpointStore, RunDirectory

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL and flock")

DEADLINE = 120.0

WRITER = """
import sys
import numpy as np
from tetherl.runs import RunDirectory

run = RunDirectory.open(sys.argv[1], "killed", keep=2, keep_best=1)
iteration = 0 if run.checkpoints.empty else run.checkpoints.load().iteration
run.metrics.truncate_after(iteration)
print("ready", flush=True)
while True:
    iteration += 1
    run.metrics.append({"iteration": iteration, "padding": "x" * 20000})
    arrays = {f"w{i}": np.full(400_000, iteration + i, np.float64) for i in range(3)}
    run.checkpoints.save(iteration, arrays, {"iteration": iteration}, score=float(iteration % 7))
    print(iteration, flush=True)
"""

# Dies right before the change to the checkpoints folder whose number is given; exits 0 when there are fewer.
STEPWISE = """
import os, signal, sys
import numpy as np
from tetherl.runs import CheckpointStore

folder, scenario, fatal = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = CheckpointStore(folder, keep=1, keep_best=0)
store.save(1, {"w": np.full(1000, 1.0)}, {"value": 1})
count = 0

def before(event, args):
    global count
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        count += 1
        if count == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(before)
store.save(2 if scenario == "next" else 1, {"w": np.full(1000, 2.0)}, {"value": 2})
"""


def leftovers(checkpoints: Path) -> list[str]:
    return [name for name in os.listdir(checkpoints) if name.startswith(".")]


def wait_for_line(process: subprocess.Popen, deadline: float) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    assert ready, "the writer did not start in time"
    return process.stdout.readline()


def test_kill_at_random_moments_never_costs_a_finished_checkpoint(tmp_path):
    moments = random.Random(7)
    deadline = time.monotonic() + DEADLINE
    checkpoints = tmp_path / "killed" / "checkpoints"
    previous = 0
    for _ in range(15):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            assert wait_for_line(process, deadline) == "ready\n"
            time.sleep(moments.uniform(0.0, 0.5))
        finally:
            process.kill()
            output, _ = process.communicate()
        reported = [int(line) for line in output.splitlines() if line.isdigit()]
        assert len(leftovers(checkpoints)) <= 1

        with RunDirectory.open(tmp_path, "killed", keep=2, keep_best=1) as run:  # the lock died with its holder
            assert leftovers(checkpoints) == []
            if run.checkpoints.empty:
                assert not reported
                continue
            found = run.checkpoints.load()
            assert found.warnings == ()  # nothing that has a checkpoint's name is incomplete
            assert found.iteration >= max([previous, *reported])
            assert found.state == {"iteration": found.iteration}
            for i in range(3):
                assert np.array_equal(found.arrays[f"w{i}"], np.full(400_000, found.iteration + i, np.float64))
            lines = [record["iteration"] for record in run.metrics.read()]
            assert lines == list(range(1, len(lines) + 1))
            assert len(lines) >= found.iteration
            previous = found.iteration
    assert previous > 0


@pytest.mark.parametrize("scenario", ["next", "same iteration again"])
def test_death_before_each_change_to_the_disk(tmp_path, scenario):
    """The older checkpoint or the newer loads, whichever step was the last; and the next open is clean."""
    values = []
    for fatal in range(1, 60):
        folder = tmp_path / str(fatal)
        done = subprocess.run(
            [sys.executable, "-c", STEPWISE, str(folder), scenario, str(fatal)], timeout=DEADLINE, check=False
        )
        assert done.returncode in (0, -9)
        reader = CheckpointStore(folder, read_only=True)
        seen_by_reader = reader.load()
        for name in os.listdir(folder):
            if not name.startswith("."):
                reader.load(name)  # nothing half-written or half-deleted has a checkpoint's name
        assert len(leftovers(folder)) <= 2
        store = CheckpointStore(folder)
        assert leftovers(folder) == []
        found = store.load()
        assert found.warnings == seen_by_reader.warnings == ()
        assert found.state == seen_by_reader.state
        assert np.array_equal(found.arrays["w"], np.full(1000, found.state["value"], float))
        values.append(found.state["value"])
        if done.returncode == 0:
            break
    assert done.returncode == 0
    assert values == sorted(values)  # up to some step the old one, from then on the new one
    assert values[0] == 1
    assert values[-2:] == [2, 2]
    assert len(values) > 8


def test_kernel_refuses_in_the_middle_of_a_file(tmp_path):
    """A real failing write, not a patched one: the process may write no file beyond 200 kB."""
    program = """
import resource, sys
import numpy as np
from tetherl.errors import CheckpointError
from tetherl.runs import CheckpointStore

store = CheckpointStore(sys.argv[1])
store.save(1, {"w": np.ones(1000)}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    store.save(2, {"w": np.ones(100_000)}, {})
except CheckpointError as error:
    print(error)
else:
    sys.exit("the save did not fail")
store.save(3, {"w": np.ones(1000)}, {})
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        timeout=DEADLINE,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "File too large" in done.stdout
    assert "0.8 MB" in done.stdout
    assert "000001" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["000001", "000003"]


def test_store_without_any_complete_checkpoint_is_no_fresh_start(tmp_path):
    (tmp_path / "000001").mkdir()
    store = CheckpointStore(tmp_path)
    assert not store.empty
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        store.load()
