"""What is made of the rounds of the bench of the HTTP edge, and the application that does nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import api
from bench.api import Server
from bench.floor import CHUNK, Floor

TINY = Path("models/tiny-llama")


def _round(request: float, token: float) -> dict[str, float]:
    return {"request_cpu_ms": request, "token_cpu_us": token, "tokens_per_s": 9.0, "api_cpu_share": 0.5, "ttft_ms": 7.0}


def test_rounds_become_medians_and_gaps_the_longest_of_all() -> None:
    server = Server("http://127.0.0.1:1", 1, "tiny", 200, idle_cpu=0.25)
    server.rounds = [_round(1.0, 90.0), _round(5.0, 10.0), _round(3.0, 30.0)]
    server.gaps_s = [0.001 * each for each in range(100, 0, -1)]
    assert api.summary(server) == {
        "streams": 200,
        "idle_cpu": 0.25,
        **_round(3.0, 30.0),
        "gap_median_ms": pytest.approx(50.5),
        "gap_p99_ms": pytest.approx(100.0),
        "gap_max_ms": pytest.approx(100.0),
    }


def test_targets_are_ours_and_the_ratio_to_vllms_own_server() -> None:
    rows = {
        "floor": _round(0.25, 25.0),
        "crossfill": _round(2.5, 40.0),
        "crossfill on vllm": _round(4.0, 60.0),
        "vllm": _round(2.0, 80.0),
    }
    found = [(each.measured, each.bound, each.reached) for each in api.targets(rows)]
    assert found == [(2.5, 2.0, False), (40.0, 50.0, True), (25.0, 50.0, True), (2.0, 1.0, False), (0.75, 1.0, True)]
    del rows["vllm"]
    assert len(api.targets(rows)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_the_floor_answers_as_many_chunks_as_were_asked_for(stream: bool) -> None:
    async def answer(asked: dict[str, Any]) -> list[str]:
        transport = httpx.ASGITransport(app=Floor(rate=1e6))
        async with httpx.AsyncClient(transport=transport, base_url="http://floor") as client:
            return (await client.post("/v1/completions", json=asked)).text.split("\n\n")

    *chunks, done, end = asyncio.run(answer({"max_tokens": 3, "stream": stream}))
    assert [json.loads(chunk.removeprefix("data: ")) for chunk in chunks] == [CHUNK] * 3
    assert (done, end) == ("data: [DONE]", "")


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.skipif(not TINY.exists(), reason="no tiny model: `make models`")
def test_a_small_run() -> None:
    words = f"--model {TINY} --requests 8 --streams 3 --tokens 6 --rate 50 --idle-s 0.2 --rounds 1"
    rows = api.run(api.parse(words.split()))
    assert list(rows) == ["floor", "crossfill"]
    for row in rows.values():
        assert row["tokens_per_s"] > 0
        assert 0 <= row["gap_median_ms"] <= row["gap_p99_ms"] <= row["gap_max_ms"]


def test_a_token_costs_what_is_used_while_all_streams_run() -> None:
    watch = api.Watch(0)
    watch._seen = [(0.0, 0.0), (1.0, 5.0), (2.0, 5.1), (4.0, 5.5), (6.0, 9.0)]  # beginnings and ends cost much more
    times = [[0.5, 1.5, 2.5, 3.5, 5.0], [0.9, 1.9, 2.9, 3.9, 4.5], [0.2, 3.0, 5.5]]
    # From the reading at 1.0, after the last first token, to that at 4.0, before the first last one: 7 tokens in 0.5 s.
    assert watch.per_token_s(times, 0.0) == pytest.approx(0.5 / 7)
    assert watch.per_token_s(times, 0.1) == pytest.approx((0.5 - 0.3) / 7)


def test_streams_that_hardly_overlap_say_nothing_of_a_token() -> None:
    watch = api.Watch(0)
    watch._seen = [(0.0, 0.0), (1.0, 5.0), (2.0, 5.1)]
    assert watch.per_token_s([[0.5, 1.5], [2.5, 3.5]], 0.0) is None
    assert watch.per_token_s([[0.5, 2.6]], 0.0) is None
