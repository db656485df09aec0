"""What a slow link may cost: the arithmetic, and a small system with its prefill engine at the far end of one."""

from __future__ import annotations

import httpx
import pytest

from bench import link, links
from bench.client import Sample
from bench.links import HELD, NEW, Visit
from bench.turns import Asker
from pipeline.sample import tiny
from tests.bench.shaped import needs_link


def _sample(route: str, ttft_ms: float, step_ms: float = 5.0, moved: int = 8_500_000) -> Sample:
    return Sample(route, 744, ttft_ms, step_ms, 4, {"bytes": moved})


def _visit(ttft: float, held: float, alone: float = 200.0) -> Visit:
    return Visit(_sample("local:a", alone), _sample("local:a", 20.0), _sample("a->b", ttft), _sample("a->b", held))


def test_the_longer_of_prefill_and_wire_bounds() -> None:
    new, held = links.rows("slow", 85e6, [_visit(245.0, 134.0), _visit(500.0, 900.0), _visit(100.0, 135.0)])
    assert (new["case"], new["prefill_ms"], new["wire_ms"], new["ttft_ms"]) == (NEW, 200.0, 100.0, 245.0)
    assert new["target_ms"] == pytest.approx(245.0)  # 200 * 1.1 + 20 + one step
    assert (held["case"], held["prefill_ms"], held["ttft_ms"]) == (HELD, 20.0, 135.0)
    assert held["target_ms"] == pytest.approx(135.0)  # 100 * 1.1 + 20 + one step
    assert [new["of_bound"], held["of_bound"]] == pytest.approx([1, 1])
    assert new["samples"] == 3


def test_a_handoff_is_held_against_p_alone_in_its_own_round() -> None:
    # the machine was slow in the second round: no handoff has lost anything there
    new, _ = links.rows("slow", 85e6, [_visit(147.0, 1, alone=100.0), _visit(1150.0, 1, alone=1125.0 / 1.1)])
    assert new["of_bound"] == pytest.approx((147 / 135 + 1) / 2)
    assert not new["reached"]
    assert links.rows("slow", 85e6, [_visit(134.0, 1, alone=100.0)])[0]["reached"]


def test_targets_are_of_the_worst_row() -> None:
    rows = links.rows("slow", 85e6, [_visit(490.0, 67.5)]) + links.rows("slow", 85e6, [_visit(245.0, 135.0)])
    found = links.targets([{"model": "light", **row} for row in rows] + [{"model": "real", **rows[0]}])
    assert [round(target.measured, 6) for target in found] == [2.0, 1.0, 2.0]
    assert [target.reached for target in found] == [False, True, False]
    assert [target.what.split(":")[0] for target in found] == ["light", "light", "real"]


def test_p_alone_and_the_handoff_take_turns_and_d_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def stream(_: httpx.Client, model: str, ids: list[int], route: str, answer: int, salt: str) -> Sample:
        asked.append((route, salt))
        return _sample(route, 100.0 + len(asked))

    monkeypatch.setattr("bench.turns.stream", stream)
    with httpx.Client() as client:
        asker = Asker(client, "m", tiny.tokenizer())
        even, odd = (links.visit(asker, [5, 6], "a", "b", number) for number in (0, 1))
    assert [route for route, _ in asked] == ["local:a", "a->b"] * 2 + ["a->b", "local:a"] * 2
    for four, visit in ((asked[:4], even), (asked[4:], odd)):
        handed = [salt for route, salt in four if route == "a->b"]
        alone = [salt for route, salt in four if route == "local:a"]
        assert len(set(handed)) == 2  # D never has what came before
        assert set(alone) == {handed[1]}  # which P has by then
        assert visit.alone.ttft_ms < visit.alone_held.ttft_ms
        assert visit.handed.ttft_ms < visit.handed_held.ttft_ms


@pytest.mark.processes
@needs_link
def test_a_system_with_its_prefill_engine_at_the_far_end() -> None:
    words = "--engines reference,mlx --tokens 100 --seconds 0 --fewest 1 --real no"
    result = links.run(links.parse(words.split()))
    assert [(row["link"], row["route"], row["case"], row["samples"]) for row in result["rows"]] == [
        (name, route, case, 1)
        for name in link.SHAPED
        for route in ("reference->mlx", "mlx->reference")
        for case in (NEW, HELD)
    ]
    # all of the prompt's KV but its last token's crossed each time: 2 pages of SmolLM2's size
    assert {row["megabytes"] for row in result["rows"]} == {2 * 1_474_560 / 1e6}
    assert len(result["targets"]) == 4
