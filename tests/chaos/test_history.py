"""The check of a history finds what is wrong in it, and nothing in one where nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.history import summary, violations

ASK = {"t": 1.0, "event": "ask", "id": 0, "expected": "abcd", "leaves": False}
END: dict[str, Any] = {
    "t": 3.0, "event": "end", "id": 0, "status": 200, "text": "abcd", "finish": "length", "code": None, "ended": True,
    "hangs": False, "api_died": False, "refused": False, "recovered": ["recomputed"],
}  # fmt: skip


@pytest.mark.parametrize(
    "end",
    [
        END,
        END | {"text": "ab", "finish": None, "code": "worker_lost"},
        END | {"status": 503, "text": "", "finish": None, "code": "broker_unavailable"},
        END | {"status": 0, "text": "", "finish": None, "ended": False, "api_died": True},
        END | {"status": 0, "text": "", "finish": None, "ended": False, "refused": True},
    ],
)
def test_what_may_happen(end: dict[str, Any]) -> None:
    assert violations([ASK, end], 100) == []


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ({"text": "abxd"}, "I5"),
        ({"text": "abcdabcd"}, "I5"),
        ({"text": "abc"}, "I4"),
        ({"finish": "stop"}, "I4"),
        ({"code": "internal_error"}, "I4"),
        ({"ended": False}, "I4"),
        ({"hangs": True}, "I9"),
        ({"t": 500.0}, "I9"),
    ],
)
def test_what_may_not(change: dict[str, Any], invariant: str) -> None:
    found = violations([ASK, END | change], 100)
    assert found
    assert any(invariant in line for line in found)


def test_every_request_ends_once_and_every_bystander_is_answered() -> None:
    assert "ended 0 times" in violations([ASK], 100)[0]
    assert "ended 2 times" in violations([ASK, END, END], 100)[0]
    assert "I10" in violations([ASK, END, {"t": 9.0, "event": "gave up", "id": 0}], 100)[0]


def test_the_numbers() -> None:
    lines = [ASK, END, ASK | {"id": 1}, END | {"id": 1, "code": "no_replica", "t": 90.0}]
    told = summary([*lines, {"t": 2.0, "event": "fault", "kind": "kill", "target": "p-0"}])
    assert told.requests == 2
    assert told.outcomes == {"right": 1, "no_replica": 1}
    assert told.faults == {"kill": 1}
    assert told.recoveries == {"recomputed": 2}
    assert (told.p50_s, told.p99_s) == (2.0, 2.0)
