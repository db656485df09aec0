"""Waterfall: one handoff's trace as a table with a bar per stage, so that overlap can be seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.table import Table

BAR_CELLS = 30


class Stage(NamedTuple):
    """From one mark of the trace to another."""

    label: str
    start: str
    end: str


class Span(NamedTuple):
    label: str
    start_ms: float
    end_ms: float


DECODE = "decode on D"
STAGES = (
    Stage("queue", "created", "prefill_started"),
    Stage("D makes room", "decode_started", "accepted"),
    Stage("prefill on P", "prefill_started", "prefill_ended"),
    Stage("until first page out", "prefill_started", "first_page_out"),
    Stage("transfer", "first_page_out", "last_page_out"),
    Stage("import on D", "first_page_in", "last_page_in"),
    Stage("verified, then first token", "committed", "first_token"),
    Stage("request to first token", "created", "first_token"),
    Stage(DECODE, "first_token", "finished"),
)


def spans(marks_ms: Mapping[str, float]) -> list[Span]:
    """The stages whose two marks the trace has. `created` is 0 by definition."""
    marks = {"created": 0.0, **marks_ms}
    return [Span(s.label, marks[s.start], marks[s.end]) for s in STAGES if s.start in marks and s.end in marks]


def bar(span: Span, total_ms: float, cells: int = BAR_CELLS) -> str:
    """`span` on a line of `cells` that stands for `total_ms`; at least one cell, so that nothing is invisible."""
    if total_ms <= 0:
        return ""
    first = min(cells - 1, int(span.start_ms / total_ms * cells))
    last = min(cells, max(first + 1, round(span.end_ms / total_ms * cells)))
    return " " * first + "█" * (last - first)


def table(trace: Mapping[str, Any]) -> Table:
    """One row per stage. Bars stand for the time to the first token; what comes later, decoding, has none."""
    found = spans(trace.get("marks_ms", {}))
    total_ms = max((span.end_ms for span in found if span.label != DECODE), default=0.0)
    view = Table("stage", box=None, pad_edge=False)
    view.add_column("from ms", justify="right")
    view.add_column("took ms", justify="right")
    view.add_column("", no_wrap=True)
    for span in found:
        drawn = "" if span.label == DECODE else bar(span, total_ms)
        view.add_row(span.label, f"{span.start_ms:.0f}", f"{span.end_ms - span.start_ms:.0f}", f"[cyan]{drawn}[/]")
    return view


def title(trace: Mapping[str, Any]) -> str:
    """Route, pages, bytes and where the prompt's KV came from, in one line."""
    route = trace.get("route") or {}
    prefill, decode = route.get("prefill_engine") or "local", route.get("decode_engine")
    parts = [
        f"{prefill} -> {decode}",
        f"{trace.get('pages', 0)} pages",
        f"{trace.get('bytes', 0) / (1 << 20):.2f} MiB",
        f"{trace.get('prompt_tokens', 0)} prompt tokens: {trace.get('imported_tokens', 0)} imported,"
        f" {trace.get('reused_tokens', 0)} reused",
    ]
    if recomputed := trace.get("recomputed"):
        parts.append(f"recomputed on D after {recomputed}")
    return ", ".join(parts)
