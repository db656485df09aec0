"""The chat bench: what a turn adds."""

from __future__ import annotations

import httpx
import pytest

from bench import turns
from bench.client import Sample
from bench.turns import Asker
from pipeline.cli.fleet import Fleet
from tests.bench.conftest import TINY


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


def test_second_turns_are_differences_within_a_round() -> None:
    there, back = turns.seconds([_round(100.0, 134.0), _round(900.0, 901.0), _round(101.0, 137.0)], "a", "b")
    assert (there["route"], there["prefill_alone_ms"], there["step_ms"], there["ttft_ms"]) == (
        "a->b",
        101.0,
        10.0,
        137.0,
    )
    assert there["added_ms"] == 24.0  # the median of 34, 1 and 36, less one step
    assert back["added_ms"] == 43.0
    assert (there["held_tokens"], there["pages"], there["bytes"], there["samples"]) == (2752, 3, 3000, 3)
    found = turns.targets([{"model": "m", "link": "loopback", **row} for row in (there, back)])
    assert [(target.measured, target.reached) for target in found] == [(24.0, True), (43.0, False)]


def test_the_wire_time_of_the_tail_comes_on_top() -> None:
    late, _ = turns.seconds([_round(100.0, 146.0)], "a", "b", rate=300_000)
    assert (late["wire_ms"], late["target_ms"], late["added_ms"], late["reached"]) == (10.0, 35.0, 36.0, False)
    early, _ = turns.seconds([_round(100.0, 145.0)], "a", "b", rate=300_000)
    assert early["reached"]
    (target,) = turns.targets([{"model": "m", "link": "slow", **late}])
    assert (target.measured, target.bound) == (26.0, 25.0)


def test_a_round_that_held_less_shows() -> None:
    there, _ = turns.seconds([_round(1.0, 1.0), _round(1.0, 1.0, held=0, moved=9000)], "a", "b")
    assert (there["held_tokens"], there["bytes"]) == (0, 6000)  # the least, and the usual


@pytest.mark.processes
def test_a_small_system_talks(small: Fleet) -> None:
    words = "--engines reference,mlx --turns 2 --first 70 --more 20 --answer 4 --fewest 2"
    options = turns.parse(words.split())
    with httpx.Client(base_url=small.url, timeout=600) as client:
        asker = Asker.of(client, TINY)
        talked = turns.talks(asker, options)
        later = turns.over_links(turns.Second(asker, options, held=130), options, None, {}, end_s=0)
    assert [(row["route"], row["turn"]) for row in talked] == [
        (route, turn) for route in ("reference->mlx", "mlx->reference") for turn in (1, 2)
    ]
    assert [row["held_tokens"] for row in talked] == [0, 64, 0, 64]
    # 130 + 20 tokens, of which the last is not transferred; the first two pages are there
    assert [(row["link"], row["held_tokens"], row["pages"], row["samples"]) for row in later] == [
        ("loopback", 128, 1, 2)
    ] * 2
