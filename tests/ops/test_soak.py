"""The soak of `ops/gpu`, small and without a GPU: what it counts, and a run on real processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from ops.gpu import system
from ops.gpu.soak import PHASES, good, phases, reached, soak
from pipeline.sample import tiny


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("", ["queued"]),
        ("decode_started", ["queued"]),
        ("decode_started prefill_started admitted accepted", ["prefilling"]),
        ("prefill_started first_page_out", ["copying"]),
        ("prefill_started first_page_out first_page_in", ["copying", "importing"]),
        ("prefill_started first_page_out last_page_out first_page_in last_page_in", ["importing"]),
        ("prefill_started first_page_out last_page_out first_page_in committed", ["before the first token"]),
        ("prefill_started committed first_token", ["streaming"]),
    ],
)
def test_a_cancel_is_counted_for_what_was_under_way(marks: str, expected: list[str]) -> None:
    assert phases({"marks_ms": dict.fromkeys(marks.split(), 1.0)}) == expected


@pytest.mark.parametrize(
    ("state", "prefill_attempt", "expected"),
    [("created", 0, 0), ("accepted", 0, 0), ("accepted", 1, 1), ("streaming", 1, 3), ("committed", 1, 4)],
)
def test_how_far_a_live_handoff_is(state: str, prefill_attempt: int, expected: int) -> None:
    assert reached({"state": state, "attempts": {"prefill": prefill_attempt, "decode": 1}}) == expected


def result(**changes: Any) -> dict[str, Any]:
    fine = {"failed_though_wanted": [], "met_in": dict.fromkeys(PHASES, 10), "later_texts_equal": 4, "later_texts": 4}
    return fine | {"free_pages_before_and_after": {"a": [7, 7], "b": [9, 9]}} | changes


def test_what_is_good() -> None:
    assert good(result(), 10)
    assert not good(result(met_in=dict.fromkeys(PHASES, 10) | {"copying": 9}), 10)
    assert not good(result(free_pages_before_and_after={"a": [7, 7], "b": [9, 8]}), 10)
    assert not good(result(later_texts_equal=3), 10)
    assert not good(result(failed_though_wanted=["engine_failed"]), 10)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_nothing_stays_behind(tmp_path: Path) -> None:
    model = tiny.write("qwen2", tmp_path / "tiny-qwen2")
    options: argparse.Namespace = system.arguments(None).parse_args([str(model), str(tmp_path / "result.json")])
    small = {"engines": "reference", "kv_mib": 64, "budget_mib": 1, "chunk": 64, "slots": 4, "lengths": "2,65,700"}
    for name, value in (small | {"seed": 3, "requests": 30, "clients": 12, "least": 1, "more": 1}).items():
        setattr(options, name, value)
    with system.opened(options) as running:
        found = soak(running, options)
    assert found["requests"] >= 30
    assert found["cancelled"] >= 3
    assert sum(found["met_in"].values()) >= 3
    assert good(found, 0), found
