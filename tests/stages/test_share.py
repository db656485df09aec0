"""The share of a KV pool that prompts may hold which are still coming in."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pipeline.errors import DeadlineError, HandoffCancelledError
from pipeline.stages.share import ImportShare


def nothing() -> None:
    pass


class Visitor(threading.Thread):
    """Holds `tokens` until `leave` is set; `order` gets its name when it is inside."""

    def __init__(self, share: ImportShare, name: str, tokens: int, order: list[str]) -> None:
        super().__init__(name=name, daemon=True)
        self.share, self.tokens, self.order = share, tokens, order
        self.inside, self.leave = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.share.holding(self.tokens, 30.0, nothing):
            self.order.append(self.name)
            self.inside.set()
            self.leave.wait(60.0)


def _until(condition: Callable[[], bool]) -> None:
    """The test's timeout bounds this."""
    while not condition():
        threading.Event().wait(0.005)


def test_what_fits_enters_at_once_and_leaves() -> None:
    share = ImportShare(100)
    with share.holding(60, 0.0, nothing), share.holding(40, 0.0, nothing):
        assert share.held_tokens == 100
    assert share.held_tokens == 0


def test_no_limit() -> None:
    share = ImportShare()
    with share.holding(1 << 40, 0.0, nothing), share.holding(1 << 40, 0.0, nothing):
        pass


def test_one_that_is_larger_than_all_enters_alone() -> None:
    share = ImportShare(100)
    with share.holding(500, 0.0, nothing), pytest.raises(DeadlineError, match="share"), share.holding(1, 0.0, nothing):
        pass
    with share.holding(1, 0.0, nothing), pytest.raises(DeadlineError), share.holding(500, 0.0, nothing):
        pass
    assert share.held_tokens == 0


def test_first_come_first_served_a_small_one_does_not_overtake() -> None:
    share, order = ImportShare(100), list[str]()
    first = Visitor(share, "first", 80, order)
    assert first.inside.wait(60)
    large = Visitor(share, "large", 90, order)
    _until(lambda: len(share._line) == 1)
    small = Visitor(share, "small", 10, order)
    _until(lambda: len(share._line) == 2)
    assert order == ["first"]
    first.leave.set()
    assert large.inside.wait(60)
    assert small.inside.wait(60)
    assert order == ["first", "large", "small"]
    for one in (large, small):
        one.leave.set()
        one.join()
    assert share.held_tokens == 0


def test_what_ends_a_wait_gives_the_place_in_line_back() -> None:
    share = ImportShare(100)

    def cancelled() -> None:
        raise HandoffCancelledError("gone")

    with share.holding(100, 0.0, nothing):
        with pytest.raises(HandoffCancelledError), share.holding(1, 30.0, cancelled):
            pass
        assert len(share._line) == 0
    with share.holding(100, 0.0, nothing):
        pass


def test_those_inside_may_leave_while_a_waiter_asks_whether_to_go_on() -> None:
    share = ImportShare(100)
    entered, leave, asking, answer = (threading.Event() for _ in range(4))

    def stay() -> None:
        with share.holding(100, 0.0, nothing):
            entered.set()
            leave.wait()

    def ask() -> None:
        asking.set()
        answer.wait()

    def follow() -> None:
        with share.holding(100, 60.0, ask):
            pass

    inside, waiter = threading.Thread(target=stay), threading.Thread(target=follow)
    inside.start()
    entered.wait()
    waiter.start()
    asking.wait()
    leave.set()
    inside.join(60)
    left = not inside.is_alive()
    answer.set()
    waiter.join()
    assert left


def test_an_error_inside_gives_the_tokens_back() -> None:
    share = ImportShare(100)
    with pytest.raises(ZeroDivisionError), share.holding(100, 0.0, nothing):
        raise ZeroDivisionError
    assert share.held_tokens == 0
