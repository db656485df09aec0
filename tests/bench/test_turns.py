"""The chat bench: what a turn adds."""

from __future__ import annotations

from bench import turns
from bench.client import Sample


def _talk(route: str, *ttfts: float) -> list[Sample]:
    trace = {"reused_tokens": 64, "pages": 2, "bytes": 1000}
    return [Sample(route, 100 * (i + 1), ttft, 5.0, 4, trace) for i, ttft in enumerate(ttfts)]


def test_added_is_over_the_prefill_engine_in_the_same_turn_and_one_step_of_d() -> None:
    talks = {
        "local:a": _talk("local:a", 50.0, 20.0),
        "local:b": _talk("local:b", 500.0, 400.0),
        "a->b": _talk("a->b", 70.0, 30.0),
        "b->a": _talk("b->a", 515.0, 402.0),
    }
    rows = turns.rows(talks, "a", "b")
    assert [(row["route"], row["turn"], row["added_ms"]) for row in rows] == [
        ("a->b", 1, 15.0),
        ("a->b", 2, 5.0),
        ("b->a", 1, 10.0),
        ("b->a", 2, -3.0),
    ]
    assert rows[0]["held_tokens"] == 64


def test_a_target_is_the_median_of_later_turns() -> None:
    added = {"a->b": (500.0, 20.0, 24.0, 90.0), "b->a": (0.0, 26.0)}
    rows = [
        {"route": route, "turn": turn, "added_ms": each}
        for route, turns_ in added.items()
        for turn, each in enumerate(turns_, start=1)
    ]
    found = turns.targets(rows)
    assert [(target.measured, target.reached) for target in found] == [(24.0, True), (26.0, False)]
