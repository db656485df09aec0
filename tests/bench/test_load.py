"""The load bench: its prompts and its arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench import load
from bench.client import Sample
from bench.load import Bounds, Run
from pipeline.cli.fleet import Fleet
from tests.bench.conftest import TINY

MODEL = Path("models/smollm2-135m/tokenizer.json")


def _sample(ttft: float, step: float, tokens: int = 10) -> Sample:
    return Sample("a->b", 5, ttft, step, tokens, {}, "", tokens)


def test_rates_and_percentiles() -> None:
    samples = [_sample(100.0, 10.0), _sample(300.0, 10.0), _sample(200.0, 90.0)]
    run = Run(samples[:1], 0.5, 0.1) + Run(samples[1:], 1.5, 0.2)
    row = load.row(run, 3, Bounds(ttft_ms=250.0, tpot_ms=50.0))
    assert (row["clients"], row["route"], row["requests"]) == (3, "a->b", 3)
    assert (row["ttft_p50_ms"], row["tpot_p50_ms"]) == (200.0, 10.0)
    assert row["ttft_p95_ms"] == pytest.approx(290.0)
    assert (row["tokens_per_s"], row["goodput_per_s"]) == (15.0, 0.5)
    assert row["d_cpu_ms_per_token"] == pytest.approx(10.0)


def test_shares_of_what_d_alone_and_p_alone_can_give() -> None:
    rate = {load.PREFILL: 5.0, load.HELD: 95.0, load.CACHED: 100.0, load.UNCACHED: 20.0, load.HANDOFF: 40.0}
    runs = {case: {"clients": 16, "tokens_per_s": each, "d_cpu_ms_per_token": 8.0} for case, each in rate.items()}
    runs[load.HANDOFF]["d_cpu_ms_per_token"] = 10.0
    rows = {row["case"]: row for row in load.compare(runs, answer=10)}
    assert rows[load.HANDOFF]["of_cached"] == 0.4
    assert rows[load.HANDOFF]["of_limit"] == 0.8  # P lets 5 requests of 10 tokens through
    assert "of_cached" not in rows[load.PREFILL]
    found = load.targets(list(rows.values()))
    # P holds all: of D cached, of D's CPU; P computes: of the slower, of D's CPU
    assert [(target.measured, target.reached) for target in found] == [
        (0.95, True),
        (1.0, True),
        (0.8, False),
        (0.8, False),
    ]
    assert load.targets([row | {"clients": 4} for row in rows.values()]) == []
    runs[load.OWN] = {"clients": 16, "tokens_per_s": 50.0, "d_cpu_ms_per_token": 8.0}
    rows = {row["case"]: row for row in load.compare(runs, answer=10)}
    assert rows[load.HANDOFF]["of_own"] == 0.8
    assert [target.measured for target in load.targets(list(rows.values()))] == [1.9, 0.95, 1.0, 0.8, 0.8, 0.8]


def test_one_answer_is_every_percentile() -> None:
    assert load.percentile([7.0], 99) == 7.0


@pytest.mark.skipif(not MODEL.exists(), reason="no sample model: `make models`")
def test_prompts_are_seeded_and_every_second_one_shares_a_prefix() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL))
    made = load.prompts(tokenizer, 8, 64, 128, seed=3)
    assert made == load.prompts(tokenizer, 8, 64, 128, seed=3)
    assert all(64 <= len(ids) <= 128 for ids in made)
    for index in (1, 3, 5, 7):
        half = min(len(made[index]) // 2, 64)
        assert any(made[index][:half] == earlier[:half] for earlier in made[:index])
    assert len({tuple(ids) for ids in made}) == 8


@pytest.mark.processes
def test_a_small_system_under_load(small: Fleet) -> None:
    words = "--engines reference,mlx --clients 2 --requests 3 --prompts 70,140 --answer 4 --uncached yes --fewest 2"
    found = load.Bench(small, None, TINY, load.parse(words.split())).sweep(end_s=0)
    rows = {row["case"]: row for row in found}
    assert list(rows) == [load.PREFILL, load.HELD, load.CACHED, load.HANDOFF, load.UNCACHED]
    assert [row["requests"] for row in rows.values()] == [6, 6, 6, 3, 6]  # where P computes in one round of the two
    assert all(row["tokens_per_s"] > 0 and row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0 for row in rows.values())
