from __future__ import annotations

import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import numpy as np
import psutil
import pytest

from tetherl.engine import LocalEngine
from tetherl.errors import ActorDiedError, ActorMethodError, ActorStartError, EngineError
from tetherl.testing import CountingActor, EngineContract

DEADLINE = 60.0
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors' processes cannot import test modules


class TestLocalEngine(EngineContract):
    def make_engine(self) -> LocalEngine:
        return LocalEngine()


class Rascal:
    """Does what an actor should not."""

    def __init__(self, exit_code=None):
        if exit_code is not None:
            os._exit(exit_code)

    def pid(self):
        return os.getpid()

    def environment(self, name):
        return os.environ.get(name)

    def total(self, array):
        return int(array.sum())

    def say(self, *lines):
        for line in lines:
            sys.stdout.write(f"{line}\n")

    def exit(self, code, *lines):
        self.say(*lines)
        os._exit(code)

    def signal(self, number):
        os.kill(os.getpid(), number)

    def sleep(self):
        time.sleep(1000)

    def hold_the_interpreter(self):
        import ctypes

        ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter lock

    def ignore_sigterm(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def start_program(self):
        program = subprocess.Popen(["sleep", "1000"])
        return program.pid

    def unsendable(self):
        return threading.Lock()


@pytest.fixture
def engine():
    engine = LocalEngine()
    yield engine
    engine.close()


def gone_soon(*pids):
    """Whether the processes end within the deadline (a zombie without a parent that waits counts as gone)."""
    until = time.monotonic() + DEADLINE
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
    return True


def test_an_actor_has_a_process_with_its_own_environment(engine):
    actor = engine.start(Rascal, name="own", env={"TETHERL_TEST": "7", "OMP_NUM_THREADS": "3"})
    assert actor.call("pid").result(DEADLINE) == actor.pid != os.getpid()
    assert actor.call("environment", "TETHERL_TEST").result(DEADLINE) == "7"
    assert actor.call("environment", "OMP_NUM_THREADS").result(DEADLINE) == "3"
    assert "TETHERL_TEST" not in os.environ


def test_calls_of_many_threads_are_all_answered(engine):
    actor = engine.start(CountingActor, name="busy", max_concurrency=3)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda i: actor.call("echo", i).result(DEADLINE)[0][0], range(400))
    assert list(results) == list(range(400))


# ---- death


def test_a_killed_actor_fails_all_its_calls(engine):
    actor = engine.start(Rascal, name="rollout worker 2")
    running, waiting = actor.call("sleep"), actor.call("pid")
    actor.ready.result(DEADLINE)
    os.kill(actor.pid, signal.SIGKILL)
    for future in (running, waiting, actor.call("pid")):
        error = future.exception(DEADLINE)
        assert isinstance(error, ActorDiedError)
        assert error.exit_code == -9
        assert "rollout worker 2 was killed by signal 9 (SIGKILL) while running sleep()" in str(error)
    assert not actor.alive() and actor.pid is None


def test_case_053_an_exit_code_and_the_last_output_are_in_the_error(engine, capfd):
    actor = engine.start(Rascal, name="env process")
    error = actor.call("exit", 7, *(f"line {i}" for i in range(100)), "no more levels").exception(DEADLINE)
    assert isinstance(error, ActorDiedError)
    assert error.exit_code == 7
    assert "env process exited with code 7 while running exit()" in str(error)
    assert str(error).endswith("    no more levels")
    assert "line 99" in str(error) and "line 10\n" not in str(error)


def test_a_death_while_constructing_is_a_death(engine):
    actor = engine.start(Rascal, exit_code=3, name="early")
    for error in (actor.ready.exception(DEADLINE), actor.call("pid").exception(DEADLINE)):
        assert isinstance(error, ActorDiedError) and "early exited with code 3 while starting" in str(error)


def test_a_crash_in_native_code_shows_where(engine):
    actor = engine.start(Rascal, name="crasher")
    error = actor.call("signal", signal.SIGSEGV).exception(DEADLINE)
    assert "crasher was killed by signal 11 (SIGSEGV)" in str(error)
    assert "in signal" in str(error)  # the line of the traceback that names the method


def test_the_death_of_one_leaves_the_others(engine):
    first, second = engine.start(Rascal, name="first"), engine.start(Rascal, name="second")
    assert isinstance(first.call("exit", 1).exception(DEADLINE), ActorDiedError)
    assert second.call("pid").result(DEADLINE) == second.pid
    again = engine.start(Rascal, name="first again")
    assert again.call("pid").result(DEADLINE) == again.pid


def test_ctrl_c_does_not_reach_an_actor(engine):
    actor = engine.start(Rascal, name="calm")
    actor.ready.result(DEADLINE)
    assert os.getpgid(actor.pid) != os.getpgid(0)
    os.kill(actor.pid, signal.SIGINT)
    assert actor.call("pid").result(DEADLINE) == actor.pid


def test_a_constructor_that_raises_and_leaves_a_thread_running(engine):
    class Threaded:
        def __init__(self):
            threading.Thread(target=time.sleep, args=(1000,)).start()
            raise ValueError("too late")

    actor = engine.start(Threaded, name="threaded")
    assert isinstance(actor.ready.exception(DEADLINE), ActorStartError)
    assert actor.pid is None


# ---- values


def test_what_cannot_be_sent_is_said_and_harms_nobody(engine):
    actor = engine.start(Rascal, name="worker")
    there = actor.call("total", threading.Lock()).exception(DEADLINE)
    assert isinstance(there, EngineError) and "worker: the arguments of total() cannot be sent" in str(there)
    inside = actor.call("total", [engine.put(1)]).exception(DEADLINE)
    assert "a Ref inside another value" in str(inside)
    back = actor.call("unsendable").exception(DEADLINE)
    assert isinstance(back, ActorMethodError) and "pickle" in str(back)
    never = engine.start(CountingActor, threading.Lock(), name="never")
    assert isinstance(never.ready.exception(DEADLINE), ActorStartError)
    assert isinstance(never.call("add").exception(DEADLINE), ActorStartError)
    assert actor.call("total", np.ones(3)).result(DEADLINE) == 3


def test_arguments_are_taken_as_they_are_at_the_call(engine):
    actor = engine.start(Rascal, name="slow starter")
    array = np.ones(100_000, np.int64)
    future = actor.call("total", array)
    array[:] = 0
    assert future.result(DEADLINE) == 100_000


def test_results_are_memory_of_their_own(engine):
    actor = engine.start(CountingActor, name="echo")
    ref = engine.put(np.zeros(100_000))
    (first,), _ = actor.call("echo", ref).result(DEADLINE)
    first += 1  # writable
    (second,), _ = actor.call("echo", ref).result(DEADLINE)
    assert not second.any() and not ref.get().any()


# ---- the end


def belongings():
    gc.collect()
    return (
        psutil.Process().num_fds(),
        threading.active_count(),
        len(psutil.Process().children(recursive=True)),
    )


def test_nothing_is_left_after_closing():
    LocalEngine().close()
    before = belongings()
    engine = LocalEngine()
    ref = engine.put(np.zeros(1_000_000))
    good = [engine.start(CountingActor, name=f"good {i}", max_concurrency=1 + i) for i in range(3)]
    futures = [actor.call("echo", ref, np.zeros(100_000)) for actor in good for _ in range(5)]
    results = [future.result(DEADLINE) for future in futures]
    failed = engine.start(CountingActor, fail="no", name="failed")
    dead = engine.start(Rascal, name="dead")
    dead_calls = [dead.call("exit", 1), dead.call("total", ref)]
    assert failed.ready.exception(DEADLINE) and all(f.exception(DEADLINE) for f in dead_calls)
    engine.start(Rascal, name="never used")
    assert belongings() > before
    engine.close()
    del ref
    assert belongings() == before
    assert len(results) == 15  # they are still held, and hold nothing themselves


def test_an_actor_that_died_leaves_nothing_even_before_closing(engine):
    before = belongings()
    actor = engine.start(Rascal, name="dead")
    assert actor.call("exit", 0).exception(DEADLINE)
    actor._reader.join(DEADLINE)
    assert belongings() == before


@pytest.mark.parametrize("method", ["sleep", "hold_the_interpreter"])
@pytest.mark.parametrize("max_concurrency", [1, 2])
def test_closing_ends_an_actor_that_does_not_listen(engine, method, max_concurrency):
    actor = engine.start(Rascal, name="deaf", max_concurrency=max_concurrency)
    actor.ready.result(DEADLINE)
    pid = actor.pid
    future = actor.call(method)
    actor.close(timeout=0.3)
    assert isinstance(future.exception(DEADLINE), ActorDiedError)
    assert not psutil.pid_exists(pid)


def test_closing_kills_an_actor_that_ignores_sigterm(engine):
    actor = engine.start(Rascal, name="stubborn")
    actor.call("ignore_sigterm").result(DEADLINE)
    pid = actor.pid
    actor.call("sleep")
    engine.close(timeout=0.1)
    assert not psutil.pid_exists(pid)


def test_closing_while_constructing(engine):
    actor = engine.start(time.sleep, 1000, name="slow")
    future = actor.call("anything")
    actor.close(timeout=0.1)
    assert future.cancelled()
    assert "slow was closed" in str(actor.ready.exception(DEADLINE))


def test_closing_in_a_callback_works(engine):
    actor = engine.start(CountingActor, name="closes itself")
    closed = threading.Event()
    actor.call("add").add_done_callback(lambda f: (actor.close(), closed.set()))
    assert closed.wait(DEADLINE)
    actor._reader.join(DEADLINE)
    assert not actor._reader.is_alive() and actor.pid is None


def test_programs_that_an_actor_started_end_with_it(engine):
    killed, closed = (engine.start(Rascal, name=name) for name in ("killed", "closed"))
    programs = [actor.call("start_program").result(DEADLINE) for actor in (killed, closed)]
    assert all(psutil.pid_exists(pid) for pid in programs)
    killed.call("signal", signal.SIGKILL).exception(DEADLINE)
    closed.close()
    assert gone_soon(*programs)
