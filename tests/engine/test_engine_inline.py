from __future__ import annotations

import pytest

from tetherl.engine import InlineEngine
from tetherl.errors import ActorMethodError
from tetherl.testing import CountingActor, EngineContract


class TestInlineEngine(EngineContract):
    def make_engine(self) -> InlineEngine:
        return InlineEngine()


def test_calls_have_run_when_call_returns():
    engine = InlineEngine()
    actor = engine.start(CountingActor, name="counter")
    assert actor.call("add").done()
    engine.close()


def test_a_method_may_call_its_own_actor():
    class Caller:
        def outer(self):
            return self.me.call("inner").result(10)

        def inner(self):
            return "inner"

        def meet(self, me):
            self.me = me

    engine = InlineEngine()
    actor = engine.start(Caller, name="caller")
    actor.call("meet", actor).result(10)
    assert actor.call("outer").result(10) == "inner"


def test_ctrl_c_in_a_method_reaches_the_caller():
    class Interrupted:
        def run(self):
            raise KeyboardInterrupt

    actor = InlineEngine().start(Interrupted, name="interrupted")
    with pytest.raises(KeyboardInterrupt):
        actor.call("run")


def test_a_close_that_raises_is_logged_and_a_stuck_thread_named(caplog):
    engine = InlineEngine()
    stuck = engine.start(Stubborn, name="stubborn", max_concurrency=2)
    future = stuck.call("wait")
    engine.close(timeout=0.05)
    assert "stubborn: its close() raised" in caplog.text
    assert "stubborn: a call is still running" in caplog.text
    stuck_object.open()
    assert future.result(60) == "waited"


def test_a_failing_pool_call_keeps_its_cause():
    engine = InlineEngine()
    actor = engine.start(CountingActor, name="counter", max_concurrency=2)
    with pytest.raises(ActorMethodError) as caught:
        actor.call("fail", "boom").result(60)
    assert isinstance(caught.value.__cause__, ValueError)
    engine.close()


stuck_object: CountingActor


class Stubborn(CountingActor):
    def __init__(self) -> None:
        super().__init__()
        global stuck_object
        stuck_object = self

    def close(self) -> None:
        raise RuntimeError("no")
