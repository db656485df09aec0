"""What a slow link may cost: the arithmetic, and a small system with its prefill engine at the far end of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import link, links
from bench.client import Sample
from bench.links import HELD, NEW, Visit


def _sample(route: str, ttft_ms: float, step_ms: float = 5.0, moved: int = 8_500_000) -> Sample:
    return Sample(route, 744, ttft_ms, step_ms, 4, {"bytes": moved})


def _visit(ttft: float, held: float) -> Visit:
    return Visit(_sample("local:a", 200.0), _sample("local:a", 20.0), _sample("a->b", ttft), _sample("a->b", held))


def test_the_longer_of_prefill_and_wire_bounds() -> None:
    new, held = links.rows("slow", 85e6, [_visit(245.0, 134.0), _visit(500.0, 900.0), _visit(100.0, 135.0)])
    assert (new["case"], new["prefill_ms"], new["wire_ms"], new["ttft_ms"]) == (NEW, 200.0, 100.0, 245.0)
    assert new["target_ms"] == pytest.approx(245.0)  # 200 * 1.1 + 20 + one step
    assert (held["case"], held["prefill_ms"], held["ttft_ms"]) == (HELD, 20.0, 135.0)
    assert held["target_ms"] == pytest.approx(135.0)  # 100 * 1.1 + 20 + one step
    assert new["reached"]
    assert held["reached"]


def test_the_wire_time_of_a_second_turn_is_that_of_its_tail() -> None:
    row = {"route": "a->b", "prompt_tokens": 3000, "bytes": 850_000}
    late, early = links.talked("slow", 85e6, [row | {"added_ms": 36.0}, row | {"added_ms": 34.0}])
    assert (late["wire_ms"], late["target_ms"], late["reached"]) == (10.0, 35.0, False)
    assert early["reached"]


def test_targets_are_of_the_worst_row() -> None:
    rows = links.rows("slow", 85e6, [_visit(490.0, 67.5)]) + links.rows("slow", 85e6, [_visit(245.0, 135.0)])
    later = [{"link": "slow", "added_ms": added, "wire_ms": 10.0} for added in (20.0, 40.0)]
    found = links.targets(rows, later)
    assert [round(target.measured, 6) for target in found] == [2.0, 1.0, 30.0]
    assert [target.reached for target in found] == [False, True, False]


@pytest.mark.processes
@pytest.mark.skipif(bool(link.missing()), reason=f"no shaped link here: {link.missing()}")
@pytest.mark.skipif(not Path("models/tiny-llama").exists(), reason="no tiny model: `make models`")
def test_a_system_with_its_prefill_engine_at_the_far_end() -> None:
    words = "--engines reference,mlx --model models/tiny-llama --lengths 100 --samples 1 --first 130 --rounds 1"
    result = links.run(links.parse(words.split()))
    assert {row["link"] for row in result["rows"]} == set(link.SHAPED)
    assert {(row["route"], row["case"]) for row in result["rows"]} == {
        (route, case) for route in ("reference->mlx", "mlx->reference") for case in (NEW, HELD)
    }
    # all of the prompt's KV but its last token's crossed each time: 2 pages
    assert len({row["megabytes"] for row in result["rows"]}) == 1
    assert [(row["link"], row["held_tokens"]) for row in result["turns"]] == [
        (name, 128) for name in link.SHAPED for _ in range(2)
    ]
    assert len(result["targets"]) == 6
