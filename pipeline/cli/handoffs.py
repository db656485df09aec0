"""`crossfill handoffs`: live ones, and those that ended lately."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape
from rich.table import Table

from pipeline.broker.operator import RECENT, Operator
from pipeline.cli import view

Rows = list[dict[str, Any]]
COLOURS = {"finished": "green", "failed": "red", "cancelled": "yellow"}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = view.add_look(
        commands,
        "handoffs",
        "show live and recent handoffs",
        lambda operator, options: look(operator, options.recent),
        table,
    )
    command.add_argument(
        "--recent", type=int, default=RECENT, metavar="N", help="ended ones shown (default %(default)s)"
    )


def look(operator: Operator, recent: int = RECENT) -> Rows:
    """Traces, live ones first, each with its age."""
    now_ms = operator.now_ms()
    return [trace | {"age_ms": round(now_ms - trace["created_ms"])} for trace in operator.handoffs(recent)]


def table(rows: Rows) -> Table:
    live = sum(row["live"] for row in rows)
    found = Table(title=f"handoffs: {live} live, {len(rows) - live} recent", title_justify="left", box=None)
    found.add_column("id", no_wrap=True)
    for heading in ("state", "route"):
        found.add_column(heading, overflow="fold")
    for heading in ("prompt", "tokens", "pages", "sent", "first token", "begun"):
        found.add_column(heading, justify="right")
    found.add_column("note", overflow="fold")
    for row in rows:
        counts = (row["prompt_tokens"], row["tokens"], row["pages"])
        times = (view.mib(row["bytes"]), first_token(row), f"{view.ago(row['age_ms'])} ago")
        state = f"[{COLOURS.get(row['state'], 'cyan')}]{row['state']}[/]"
        found.add_row(row["handoff_id"], state, escape(view.route(row)), *map(str, counts), *times, escape(note(row)))
    return found


def first_token(trace: dict[str, Any]) -> str:
    at = trace["marks_ms"].get("first_token")
    return "-" if at is None else f"{at:.0f} ms"


def note(trace: dict[str, Any]) -> str:
    """What was out of the ordinary."""
    parts = [f"{role} attempt {count}" for role, count in trace["attempts"].items() if count > 1]
    if trace["recomputed"]:
        parts.append(f"recomputed on D: {trace['recomputed']}")
    if trace["error"]:
        parts.append(trace["error"])
    if trace["reason"]:
        parts.append(f"cancelled: {trace['reason']}")
    return ", ".join(parts)
