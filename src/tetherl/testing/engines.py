"""What every engine must do, as tests, and the actor that they use."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tetherl.engine.contract import Engine
from tetherl.errors import ActorDiedError, ActorMethodError, ActorStartError, EngineError

DEADLINE = 60.0
"""Seconds after which a test gives up; generous, since the machine may be busy."""


@dataclass
class Parcel:
    """Arrays inside other things, as a fragment has them."""

    name: str
    arrays: dict[str, np.ndarray]
    parts: list[Parcel] = field(default_factory=list)


class CountingActor:
    """Counts its calls, and does on request what engines must cope with."""

    def __init__(self, start: int = 0, *, fail: str = "", closed_file: str = "") -> None:
        """`fail`: raise ValueError with this text. `closed_file`: created by close()."""
        if fail:
            raise ValueError(fail)
        self.count = start
        self._closed_file = closed_file
        self._gate = threading.Event()
        self._log: list[Any] = []
        self._inside = 0
        self._most_inside = 0

    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs)

    def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    def note(self, item: Any) -> None:
        """Append to the log, slowly; two at once would be seen by `most_inside`."""
        self._inside += 1
        self._most_inside = max(self._most_inside, self._inside)
        time.sleep(0.002)
        self._log.append(item)
        self._inside -= 1

    def noted(self) -> tuple[list[Any], int]:
        """The log, and the largest number of `note` calls at the same time."""
        return self._log, self._most_inside

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def fail_oddly(self) -> None:
        """Raise an exception that cannot be rebuilt elsewhere."""

        class OddError(Exception):
            def __init__(self, lock: Any, text: str) -> None:
                super().__init__(text)
                self.lock = lock

        raise OddError(threading.Lock(), "odd")

    def leave(self) -> None:
        raise SystemExit("leaving")

    def wait(self) -> str:
        """Block until `open` is called (or close)."""
        if not self._gate.wait(DEADLINE):
            raise TimeoutError("nobody called open")
        return "waited"

    def open(self) -> None:
        self._gate.set()

    def wait_for_file(self, path: str) -> None:
        until = time.monotonic() + DEADLINE
        while not pathlib.Path(path).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"nobody made {path}")
            time.sleep(0.005)

    def close(self) -> None:
        self._gate.set()
        if self._closed_file:
            pathlib.Path(self._closed_file).write_text("closed")


class EngineContract:
    """Subclass it in a test module and give `make_engine`; pytest runs every test."""

    def make_engine(self) -> Engine:
        raise NotImplementedError

    @contextlib.contextmanager
    def engine(self) -> Iterator[Engine]:
        engine = self.make_engine()
        try:
            yield engine
        finally:
            engine.close()

    def test_calls_are_answered(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, 5, name="counter")
            actor.ready.result(DEADLINE)
            assert actor.alive() and actor.name == "counter"
            assert _get(actor.call("add")) == 6
            assert _get(actor.call("add", amount=4)) == 10
            assert _get(actor.call("echo", 1, "two", three=[3, None])) == ((1, "two"), {"three": [3, None]})

    def test_a_class_can_be_named(self) -> None:
        with self.engine() as engine:
            actor = engine.start("tetherl.testing.engines:CountingActor", start=2, name="named")
            assert _get(actor.call("add")) == 3
            for wrong in (
                "tetherl.testing.engines",
                "tetherl.no_such_module:X",
                "tetherl.testing.engines:NoSuch",
            ):
                error = _error(engine.start(wrong, name="nobody").ready)
                assert isinstance(error, ActorStartError)
                assert wrong.split(":")[-1] in str(error) or "no_such_module" in str(error)

    def test_calls_run_in_order_one_at_a_time(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="notes")
            futures = [actor.call("note", i) for i in range(50)]
            concurrent.futures.wait(futures, DEADLINE)
            assert _get(actor.call("noted")) == (list(range(50)), 1)

    def test_a_blocking_call_does_not_block_another(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="gate", max_concurrency=2)
            waiting = actor.call("wait")
            assert _get(actor.call("add")) == 1
            assert not waiting.done()
            assert _get(actor.call("open")) is None
            assert _get(waiting) == "waited"

    def test_a_deadline_gives_up_waiting_and_the_call_goes_on(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="gate", max_concurrency=2)
            waiting = actor.call("wait")
            assert isinstance(_error(waiting, 0.05), TimeoutError)
            actor.call("open")
            assert _get(waiting) == "waited"

    def test_a_call_that_has_not_started_can_be_cancelled(self, tmp_path: pathlib.Path) -> None:
        gate = tmp_path / "gate"
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="gate", max_concurrency=2)
            actor.ready.result(DEADLINE)
            running = [actor.call("wait_for_file", str(gate)) for _ in range(2)]
            unwanted, wanted = actor.call("add", 100), actor.call("add", 1)
            assert unwanted.cancel() and not running[0].cancel()
            assert not wanted.done()
            gate.touch()
            assert _get(wanted) == 1
            assert [_get(f) for f in running] == [None, None]
            done, _ = concurrent.futures.wait([unwanted], DEADLINE)
            assert unwanted in done and unwanted.cancelled()
            assert _get(actor.call("add", 1)) == 2

    def test_the_first_finished_can_be_waited_for(self) -> None:
        with self.engine() as engine:
            slow = engine.start(CountingActor, name="slow", max_concurrency=2)
            fast = engine.start(CountingActor, name="fast", max_concurrency=2)
            futures = {slow.call("wait"): "slow", fast.call("add"): "fast"}
            done, open_ = concurrent.futures.wait(futures, DEADLINE, return_when=FIRST_COMPLETED)
            assert [futures[f] for f in done] == ["fast"]
            slow.call("open")
            assert _get(open_.pop()) == "waited"

    def test_callbacks_run_and_may_call_again(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="counter")
            second: Future[int] = Future()

            def again(first: Future[int]) -> None:
                actor.call("add", first.result()).add_done_callback(lambda f: second.set_result(f.result()))

            actor.call("add", 3).add_done_callback(again)
            assert _get(second) == 6

    # How things fail

    def test_a_method_that_raises_leaves_the_actor_alive(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="rollout worker 2")
            error = _error(actor.call("fail", "no such level"))
            assert isinstance(error, ActorMethodError)
            assert "rollout worker 2" in str(error) and "ValueError: no such level" in str(error)
            assert "raise ValueError(text)" in error.remote_traceback
            assert isinstance(error.__cause__, ValueError) and error.__cause__.args == ("no such level",)
            assert actor.alive() and _get(actor.call("add")) == 1

    def test_any_exception_is_reported(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="odd")
            for method, word in (
                ("fail_oddly", "OddError: odd"),
                ("leave", "SystemExit"),
                ("nothing", "nothing"),
            ):
                error = _error(actor.call(method))
                assert isinstance(error, ActorMethodError) and word in str(error), error
            assert isinstance(_error(actor.call("add", 1, 2, 3)), ActorMethodError)
            assert _get(actor.call("add")) == 1

    def test_a_constructor_that_raises(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="rollout worker 1", fail="no display")
            for error in (_error(actor.ready), _error(actor.call("add")), _error(actor.call("add"))):
                assert isinstance(error, ActorStartError)
                assert "rollout worker 1" in str(error) and "ValueError: no display" in str(error)
                assert "raise ValueError(fail)" in error.remote_traceback
                assert isinstance(error.__cause__, ValueError)
            assert not actor.alive() and actor.pid is None
            actor.close()

    # Values

    def test_arrays_come_back_exactly(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="echo")
            for name, array in sample_arrays().items():
                (((back,), _)) = _get(actor.call("echo", array))
                assert_same(back, array, name)
            everything = Parcel("all", sample_arrays(), [Parcel("part", sample_arrays()), Parcel("empty", {})])
            args, kwargs = _get(actor.call("echo", [everything, (1, {"x": everything.arrays})], parcel=everything))
            assert_same(args, ([everything, (1, {"x": everything.arrays})],), "nested")
            assert_same(kwargs, {"parcel": everything}, "named")

    def test_a_shared_value_is_read_many_times(self) -> None:
        with self.engine() as engine:
            actors = [engine.start(CountingActor, name=f"reader {i}") for i in range(2)]
            array = np.arange(300_000, dtype=np.float32)
            ref = engine.put(array)
            small = engine.put({"version": 3})
            futures = [actor.call("echo", ref, 1, small=small, again=ref) for actor in actors for _ in range(2)]
            totals = [actor.call("total", ref) for actor in actors]
            del ref, small  # calls that were made still get it
            for future in futures:
                args, kwargs = _get(future)
                assert_same(args, (array, 1), "shared")
                assert_same(kwargs, {"small": {"version": 3}, "again": array}, "shared, named")
            assert [_get(f) for f in totals] == [float(array.sum())] * 2

    def test_a_shared_value_can_be_read_here_and_given_to_a_constructor(self) -> None:
        with self.engine() as engine:
            ref = engine.put(41)
            assert ref.get() == 41
            assert _get(engine.start(CountingActor, ref, name="counter").call("add")) == 42
            assert _get(engine.start(CountingActor, start=ref, name="counter").call("add")) == 42

    # The end

    def test_closing_twice_is_fine_and_calls_fail_afterwards(self) -> None:
        engine = self.make_engine()
        actor = engine.start(CountingActor, name="counter")
        assert _get(actor.call("add")) == 1
        actor.close()
        actor.close()
        assert not actor.alive()
        error = _error(actor.call("add"))
        assert isinstance(error, ActorDiedError) and "counter was closed" in str(error)
        engine.close()
        engine.close()
        try:
            engine.start(CountingActor, name="late")
        except EngineError as refused:
            assert "late" in str(refused)
        else:
            raise AssertionError("a closed engine started an actor")

    def test_close_calls_the_actors_own_close(self, tmp_path: pathlib.Path) -> None:
        files = [tmp_path / f"closed-{i}" for i in range(3)]
        with self.engine() as engine:
            for i, file in enumerate(files):
                concurrency = 1 + i % 2
                engine.start(CountingActor, closed_file=str(file), name=str(file), max_concurrency=concurrency)
        assert [file.read_text() for file in files] == ["closed"] * 3

    def test_close_makes_blocked_calls_return_and_cancels_those_that_wait(self) -> None:
        with self.engine() as engine:
            actor = engine.start(CountingActor, name="gate", max_concurrency=2)
            running = [actor.call("wait"), actor.call("wait")]
            waiting = actor.call("add")
            actor.ready.result(DEADLINE)
            actor.close(DEADLINE)
            assert [_get(f) for f in running] == ["waited", "waited"]
            assert waiting.cancelled()


def sample_arrays() -> dict[str, np.ndarray]:
    """Arrays of all kinds that travel: small and large, empty, without dimensions, not contiguous."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (60, 84, 84, 3), np.uint8)
    grid = rng.normal(size=(64, 500))
    arrays = {
        "image": image,
        "large float32": grid.astype(np.float32),
        "float64": grid[0],
        "bool": grid > 0,
        "small int64": np.arange(5),
        "no dimensions": np.array(3.5, np.float32),
        "empty": np.zeros((0, 7), np.int32),
        "transposed": image.T,
        "every other": grid[::2, ::-1],
        "column order": np.asfortranarray(grid),
        "broadcast": np.broadcast_to(np.float32(2.0), (300, 300)),
        "text": np.array(["a", "bc"]),
    }
    for dtype in (np.int8, np.int16, np.uint16, np.uint32, np.uint64, np.float16, np.complex64):
        arrays[np.dtype(dtype).name] = rng.integers(0, 100, (40, 400)).astype(dtype)
    return arrays


def assert_same(got: Any, expected: Any, where: str) -> None:
    """Equal in structure, type, dtype, shape and every bit."""
    assert type(got) is type(expected), f"{where}: {type(got)} instead of {type(expected)}"
    if isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), f"{where}: {got.dtype} {got.shape}"
        assert got.tobytes() == expected.tobytes(), f"{where}: other values"
    elif isinstance(expected, Parcel):
        assert_same(vars(got), vars(expected), where)
    elif isinstance(expected, dict):
        assert list(got) == list(expected), f"{where}: keys {list(got)}"
        for key, value in expected.items():
            assert_same(got[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), f"{where}: length {len(got)}"
        for i, value in enumerate(expected):
            assert_same(got[i], value, f"{where}[{i}]")
    else:
        assert got == expected, f"{where}: {got!r} instead of {expected!r}"


def _get(future: Future[Any]) -> Any:
    return future.result(DEADLINE)


def _error(future: Future[Any], timeout: float = DEADLINE) -> BaseException | None:
    """What the future raises, a timeout included."""
    try:
        return future.exception(timeout)
    except TimeoutError as late:
        return late
