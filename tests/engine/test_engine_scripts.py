"""The local engine in programs of its own: what happens to actors when their parent ends, and to its output."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

DEADLINE = 60.0


def start(tmp_path, text, *args):
    script = tmp_path / "script.py"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(tmp_path, text, *args):
    """Run a script to its end; gives exit code, stdout, stderr."""
    process = start(tmp_path, text, *args)
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_gone(pids):
    until = time.monotonic() + DEADLINE
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, f"process {pid} lives on: {psutil.Process(pid).cmdline()}"
            time.sleep(0.02)


NO_GUARD = """
import sys
from dataclasses import dataclass
from tetherl.engine import LocalEngine

print("this script runs once")
offset = 10

@dataclass
class Answer:
    value: int

def helper(x):
    return x + offset

class Mine:
    def __init__(self, make):
        self.make = make
    def ask(self, question: Answer) -> Answer:
        print("actor speaks")
        print("actor complains", file=sys.stderr)
        assert type(question) is Answer
        return Answer(helper(self.make(question.value)))

engine = LocalEngine()
actor = engine.start(Mine, lambda x: 2 * x, name="mine")
answer = actor.call("ask", Answer(1)).result(60)
assert type(answer) is Answer, type(answer)
print("answer", answer.value)
engine.close()
"""


def test_a_script_needs_no_guard_and_its_stdout_is_its_own(tmp_path):
    code, out, err = run(tmp_path, NO_GUARD)
    assert code == 0, err
    assert out.splitlines() == ["this script runs once", "answer 12"]
    assert "actor speaks" in err and "actor complains" in err


def test_modules_beside_the_script_are_found(tmp_path):
    (tmp_path / "mygame.py").write_text("class Game:\n    def play(self):\n        return 'played'\n")
    script = """
from tetherl.engine import LocalEngine
engine = LocalEngine()
by_name = engine.start("mygame:Game", name="by name")
print(by_name.call("play").result(60))
import mygame
print(engine.start(mygame.Game, name="by class").call("play").result(60))
engine.close()
"""
    code, out, err = run(tmp_path, script)
    assert (code, out) == (0, "played\nplayed\n"), err


FORGOTTEN = """
import json, os, sys
from tetherl.engine import LocalEngine
class Worker:
    def __init__(self, path): self.path = path
    def pid(self): return os.getpid()
    def close(self): open(self.path, "w").write("closed")
engine = LocalEngine()
actors = [engine.start(Worker, f"{sys.argv[1]}/{i}", name=f"worker {i}") for i in range(2)]
print(json.dumps([a.call("pid").result(60) for a in actors]))
if sys.argv[2] == "raise":
    raise RuntimeError("the script failed")
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.exit(0)
if sys.argv[2] == "fork":
    os.wait()
    assert [a.call("pid").result(60) for a in actors]
"""


@pytest.mark.parametrize("end", ["return", "raise", "fork"])
def test_an_engine_that_was_not_closed_is_closed_at_exit(tmp_path, end):
    code, out, err = run(tmp_path, FORGOTTEN, str(tmp_path), end)
    assert code == (1 if end == "raise" else 0), err
    wait_gone(json.loads(out.splitlines()[0]))
    assert [(tmp_path / str(i)).read_text() for i in range(2)] == ["closed", "closed"]


KILLED = """
import ctypes, json, os, subprocess, sys, time
import numpy as np
from tetherl.engine import LocalEngine
class Worker:
    def pids(self): return [os.getpid(), subprocess.Popen(["sleep", "1000"]).pid]
    def idle(self): time.sleep(1000)
    def busy(self):
        while True: pass
    def native(self): ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter lock
engine = LocalEngine()
array = np.zeros(10_000_000)
kept = engine.put(array)
pids = []
for method in ("none", "idle", "busy", "native"):
    for concurrency in (1, 2):
        actor = engine.start(Worker, name=method, max_concurrency=concurrency)
        pids += actor.call("pids").result(60)
        if method != "none":
            actor.call(method)
engine.start(time.sleep, 1000, name="constructing")
print(json.dumps(pids), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_actors_end_with_a_killed_parent(tmp_path, number):
    named = set(os.listdir("/dev/shm")) if pathlib.Path("/dev/shm").exists() else set()
    parent = start(tmp_path, KILLED)
    pids = json.loads(parent.stdout.readline())
    children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    assert set(pids) <= set(children) and len(children) >= 17
    parent.send_signal(number)
    parent.wait(DEADLINE)
    wait_gone(children)
    parent.communicate()
    if named:
        assert not [name for name in set(os.listdir("/dev/shm")) - named if "tetherl" in name]


INTERRUPTED = """
import json, os, time
from tetherl.engine import LocalEngine
class Worker:
    def pid(self): return os.getpid()
    def work(self): time.sleep(1000)
engine = LocalEngine()
actors = [engine.start(Worker, name=f"worker {i}") for i in range(2)]
print(json.dumps([a.call("pid").result(60) for a in actors]), flush=True)
try:
    actors[0].call("work").result(60)
except KeyboardInterrupt:
    assert all(a.alive() for a in actors)
    assert actors[1].call("pid").result(60)
    print("stopping", flush=True)
    engine.close(timeout=1000)
"""


def test_ctrl_c_stops_the_parent_only_and_a_second_one_ends_the_waiting(tmp_path):
    parent = start(tmp_path, INTERRUPTED)
    pids = json.loads(parent.stdout.readline())
    os.killpg(parent.pid, signal.SIGINT)  # what a terminal does
    assert parent.stdout.readline() == "stopping\n"
    time.sleep(0.3)  # it now waits for a worker that does not listen; if not yet, the signal comes a bit early
    os.killpg(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=DEADLINE)
    assert "KeyboardInterrupt" in err
    wait_gone(pids)
