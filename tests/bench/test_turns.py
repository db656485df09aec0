"""The chat bench: what a turn adds."""

from __future__ import annotations

import pytest

from bench import turns
from bench.client import Sample
from pipeline.cli.fleet import Fleet


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


def _round(alone: float, handed: float, held: int = 2752, moved: int = 3000) -> dict[str, Sample]:
    trace = {"reused_tokens": held, "pages": 3, "bytes": moved}
    other = Sample("b->a", 2896, 900.0, 5.0, 4, trace)
    return {
        "local:a": Sample("local:a", 2896, alone, 7.0, 4, {}),
        "local:b": Sample("local:b", 2896, 850.0, 10.0, 4, {}),
        "a->b": Sample("a->b", 2896, handed, 5.0, 4, trace),
        "b->a": other,
    }


def test_second_turns_are_medians_over_the_rounds() -> None:
    there, back = turns.seconds([_round(100.0, 134.0), _round(900.0, 900.0), _round(101.0, 136.0)], "a", "b")
    assert (there["route"], there["prefill_alone_ms"], there["step_ms"], there["ttft_ms"]) == (
        "a->b",
        101.0,
        10.0,
        136.0,
    )
    assert there["added_ms"] == 25.0
    assert back["added_ms"] == 43.0
    assert (there["held_tokens"], there["pages"], there["bytes"], there["rounds"]) == (2752, 3, 3000, 3)
    found = turns.targets([there, back])
    assert [(target.measured, target.reached) for target in found] == [(25.0, True), (43.0, False)]


def test_a_round_that_held_less_shows() -> None:
    there, _ = turns.seconds([_round(1.0, 1.0), _round(1.0, 1.0, held=0, moved=9000)], "a", "b")
    assert (there["held_tokens"], there["bytes"]) == (0, 9000)


@pytest.mark.processes
def test_a_small_system_talks(small: Fleet) -> None:
    words = "--engines reference,mlx --model models/tiny-llama --turns 2 --first 70 --more 20 --answer 4 --held 130"
    result = turns.measure(small, turns.parse([*words.split(), "--rounds", "2"]))
    assert [(row["route"], row["turn"]) for row in result["rows"]] == [
        (route, turn) for route in ("reference->mlx", "mlx->reference") for turn in (1, 2)
    ]
    assert [row["held_tokens"] for row in result["rows"]] == [0, 64, 0, 64]
    # 130 + 20 tokens, of which the last is not transferred; the first two pages are there
    assert [(row["held_tokens"], row["pages"], row["rounds"]) for row in result["second"]] == [(128, 1, 2)] * 2
    assert len(result["targets"]) == 2
