"""Spans and bars of a trace."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeline.cli import waterfall
from pipeline.cli.waterfall import Span

TRACE = {
    "route": {"prefill_engine": "vllm", "decode_engine": "mlx"},
    "prompt_tokens": 130,
    "pages": 3,
    "bytes": 3 << 20,
    "imported_tokens": 65,
    "reused_tokens": 64,
    "recomputed": None,
    "marks_ms": {"created": 0.0, "prefill_started": 10.0, "prefill_ended": 110.0, "first_page_out": 60.0},
}


def test_a_stage_without_both_marks_is_left_out() -> None:
    assert waterfall.spans(TRACE["marks_ms"]) == [  # type: ignore[arg-type]
        Span("queue", 0.0, 10.0),
        Span("prefill on P", 10.0, 110.0),
        Span("until first page out", 10.0, 60.0),
    ]


@pytest.mark.parametrize(
    ("start_ms", "end_ms", "drawn"),
    [
        (0.0, 100.0, "##########"),
        (50.0, 100.0, "     #####"),
        (20.0, 40.0, "  ##"),
        (31.0, 31.5, "   #"),  # never invisible
        (100.0, 100.0, "         #"),  # never outside
    ],
)
def test_bar(start_ms: float, end_ms: float, drawn: str) -> None:
    assert waterfall.bar(Span("x", start_ms, end_ms), 100.0, cells=10).replace("█", "#") == drawn


def test_bar_of_nothing() -> None:
    assert waterfall.bar(Span("x", 0.0, 0.0), 0.0) == ""


def test_table_shows_times_and_scales_bars_to_the_first_token() -> None:
    marks = {"prefill_started": 10.0, "prefill_ended": 110.0, "first_token": 200.0, "finished": 900.0}
    out = io.StringIO()
    Console(file=out, width=80).print(waterfall.table({"marks_ms": marks}))
    header, *rows = (line.rstrip() for line in out.getvalue().splitlines())
    assert header.split() == ["stage", "from", "ms", "took", "ms"]
    assert [(row[:26].strip(), *row[26:].split()[:2], row.count("█")) for row in rows] == [
        ("queue", "0", "10", 2),
        ("prefill on P", "10", "100", 15),
        ("request to first token", "0", "200", 30),
        ("decode on D", "200", "700", 0),
    ]


def test_title() -> None:
    assert waterfall.title(TRACE) == "vllm -> mlx, 3 pages, 3.00 MiB, 130 prompt tokens: 65 imported, 64 reused"


def test_title_of_a_local_and_of_a_recomputed_handoff() -> None:
    assert waterfall.title({"route": {"prefill_engine": None, "decode_engine": "mlx"}}).startswith("local -> mlx")
    assert waterfall.title(TRACE | {"recomputed": "peer_error"}).endswith("recomputed on D after peer_error")
