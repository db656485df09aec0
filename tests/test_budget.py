"""The pure credit ledger, rule by rule. `broker/test_budget_scripts.py` drives it and the scripts in lockstep."""

from __future__ import annotations

import pytest

from pipeline.budget import WAITER_LEASE_MS, Answer, Budget, require_fits, share
from pipeline.errors import BudgetTooSmallError

GRANTED, WAIT, REFUSED = Answer.GRANTED, Answer.WAIT, Answer.REFUSED


def budget(size: int = 16) -> Budget:
    return Budget(size, lease_ms=1000)


def test_a_credit_counts_once_however_often_it_is_asked_for() -> None:
    ledger = budget()
    assert [ledger.reserve("a", "1", 5, 0) for _ in range(3)] == [GRANTED] * 3
    assert (ledger.total, ledger.held("a")) == (5, 5)
    ledger.release("a", "1", 0)
    ledger.release("a", "1", 0)
    assert (ledger.total, ledger.credits, ledger.leases) == (0, {}, {})


@pytest.mark.parametrize(("total", "value", "expected"), [(1600, 10, 200), (16, 5, 10), (10, 8, 16), (17, 1, 2)])
def test_share_is_two_values_or_an_eighth(total: int, value: int, expected: int) -> None:
    assert share(total, value) == expected


def test_a_handoff_at_its_share_waits_and_stands_in_nobodys_way() -> None:
    ledger = budget()
    assert [ledger.reserve("a", str(n), 4, 0) for n in range(3)] == [GRANTED, GRANTED, WAIT]
    assert ledger.queue() == []
    assert ledger.reserve("b", "0", 4, 0) is GRANTED
    ledger.release("a", "0", 0)
    assert ledger.woken == {"a"}
    assert ledger.reserve("a", "2", 4, 0) is GRANTED


def test_what_can_never_fit_is_refused() -> None:
    assert budget(16).reserve("a", "0", 17, 0) is REFUSED
    require_fits(16, 16)
    with pytest.raises(BudgetTooSmallError, match="set budget_bytes to 17 or more"):
        require_fits(16, 17)


def test_first_come_first_served_and_nobody_overtakes() -> None:
    ledger = budget(10)
    assert ledger.reserve("a", "0", 6, 0) is GRANTED
    assert ledger.reserve("big", "0", 8, 0) is WAIT
    assert ledger.reserve("small", "0", 1, 0) is WAIT  # it would fit, but it came later
    assert ledger.queue() == ["big", "small"]
    assert ledger.woken == set()
    ledger.release("a", "0", 0)
    assert ledger.woken == {"big", "small"}
    assert ledger.reserve("small", "0", 1, 0) is WAIT  # woken early, still behind
    assert ledger.reserve("big", "0", 8, 0) is GRANTED
    assert ledger.reserve("small", "0", 1, 0) is GRANTED
    assert (ledger.total, ledger.waits) == (9, {})


def test_asking_again_keeps_the_place_in_the_line() -> None:
    ledger = budget(4)
    ledger.reserve("a", "0", 4, 0)
    for handoff in ("b", "c", "b"):
        assert ledger.reserve(handoff, "0", 4, 0) is WAIT
    assert ledger.queue() == ["b", "c"]


def test_a_waiter_that_stopped_asking_is_passed_over() -> None:
    ledger = budget(4)
    ledger.reserve("a", "0", 4, 0)
    ledger.reserve("dead", "0", 4, 0)
    ledger.reserve("alive", "0", 4, 1000)
    ledger.release("a", "0", WAITER_LEASE_MS)
    assert (ledger.queue(), ledger.woken) == (["alive"], {"alive"})
    assert ledger.reserve("alive", "0", 4, WAITER_LEASE_MS) is GRANTED


def test_wakes_go_down_the_line_while_bytes_remain() -> None:
    ledger = budget(10)
    ledger.reserve("a", "0", 5, 0)
    ledger.reserve("a", "1", 5, 0)
    for handoff, size in (("b", 3), ("c", 2), ("d", 1)):
        ledger.reserve(handoff, "0", size, 0)
    ledger.release("a", "0", 0)
    assert ledger.woken == {"b", "c"}


def test_true_up_only_shrinks() -> None:
    ledger = budget(10)
    ledger.reserve("a", "0", 8, 0)
    ledger.reserve("b", "0", 5, 0)
    ledger.true_up("a", "0", 9, 0)
    assert (ledger.total, ledger.woken) == (8, set())
    ledger.true_up("a", "0", 3, 0)
    assert (ledger.total, ledger.woken) == (3, {"b"})
    ledger.true_up("a", "unknown", 1, 0)
    assert ledger.credits == {"a": {"0": 3}}


def test_close_returns_everything_and_forgets_the_waiter() -> None:
    ledger = budget(10)
    ledger.reserve("a", "0", 5, 0)
    ledger.reserve("a", "1", 5, 0)
    ledger.reserve("b", "0", 5, 0)
    ledger.reserve("c", "0", 5, 0)
    ledger.close("b", 0)
    ledger.close("a", 0)
    ledger.close("a", 0)
    assert (ledger.total, ledger.queue(), ledger.woken) == (0, ["c"], {"c"})


def test_silent_handoffs_are_reaped_and_live_ones_are_not() -> None:
    ledger = budget(100)
    ledger.reserve("a", "0", 5, 0)
    ledger.reserve("b", "0", 5, 0)
    ledger.heartbeat("b", 500)
    ledger.heartbeat("unknown", 500)
    assert ledger.reap(999) == []
    assert ledger.reap(1000) == ["a"]
    assert (ledger.total, ledger.credits) == (5, {"b": {"0": 5}})
