from __future__ import annotations

import threading

import pytest

from pipeline.errors import EngineError

pytest.importorskip("mlx.core", exc_type=ImportError)

from pipeline.engines.mlx.loop import Loop


class Counter:
    """Has `work` steps to do; a negative number of them fails."""

    def __init__(self) -> None:
        self.work = 0
        self.steps = 0
        self.idle = threading.Event()
        self.died: Exception | None = None
        self.ended_on = ""

    def step(self) -> bool:
        if self.work < 0:
            raise ValueError("no such work")
        self.steps += self.work > 0
        self.work -= self.work > 0
        if not self.work:
            self.idle.set()
        return self.work > 0

    def die(self, error: Exception) -> None:
        self.died = error

    def end(self) -> None:
        self.ended_on = threading.current_thread().name


def test_steps_run_until_the_work_is_done_and_again_after_a_command() -> None:
    loop = Loop[Counter]("counting", lambda _: Counter())
    counter = loop.stepper

    def give() -> None:
        counter.idle.clear()
        counter.work = 5

    for total in (5, 10):
        loop.call(give)
        assert counter.idle.wait(60)
        assert counter.steps == total
    loop.stop()
    loop.stop()
    assert counter.ended_on == "counting"
    assert counter.died is None


def test_a_command_that_fails_is_its_callers() -> None:
    loop = Loop[Counter]("counting", lambda _: Counter())
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: [1 // 0].clear())
    loop.call(lambda: None)
    loop.stop()


def test_a_step_that_fails_ends_the_thread() -> None:
    loop = Loop[Counter]("counting", lambda _: Counter())
    loop.post(lambda: setattr(loop.stepper, "work", -1))
    loop._thread.join(60)
    assert isinstance(loop.stepper.died, ValueError)
    with pytest.raises(EngineError, match="the engine has ended"):
        loop.call(lambda: None)
    loop.stop()


def test_commands_left_at_the_end_are_refused() -> None:
    loop = Loop[Counter]("counting", lambda _: Counter())
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        leave.wait(60)
        loop._stopping = True

    holding = loop.post(hold)
    assert entered.wait(60)
    left = loop.post(lambda: None)
    leave.set()
    assert holding.result(60) is None
    with pytest.raises(EngineError):
        left.result(60)
    loop.stop()


def test_the_constructor_raises_what_building_raises() -> None:
    def build(_: Loop[Counter]) -> Counter:
        raise FileNotFoundError("no such model")

    with pytest.raises(FileNotFoundError, match="no such model"):
        Loop[Counter]("counting", build)
