"""`crossfill handoff ID`: one handoff, live or ended lately: who worked on it, what moved, where the time went.

`crossfill handoff show|verify|diff FILE` looks into stored ones: `stored.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pipeline.broker.operator import Operator
from pipeline.cli import handoffs, stored, view, waterfall
from pipeline.errors import ConfigError, HandoffUnknownError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("handoff", help="show where one handoff spent its time")
    command.add_argument(
        "what",
        nargs="+",
        metavar="ID | show FILE.. | verify FILE.. | diff FILE FILE",
        help="32 hex digits, as `crossfill handoffs` and the answer's X-Crossfill-Trace show them; or stored handoffs",
    )
    view.add_flags(command)
    stored.add_flags(command)
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> int:
    first, *others = options.what
    if first in stored.VERBS:
        return stored.run(options, first, [Path(name) for name in others])
    if others:
        raise ConfigError(f"one handoff is shown at a time; of files: {', '.join(stored.VERBS)}")
    with view.operator(options) as operator:
        view.show(options, lambda: look(operator, first), draw)
    return 0


def look(operator: Operator, handoff_id: str) -> dict[str, Any]:
    """Its trace. Raises HandoffUnknownError."""
    found = operator.handoff(handoff_id)
    if found is None:
        raise HandoffUnknownError(handoff_id)
    return found


def draw(trace: dict[str, Any]) -> RenderableType:
    """State and people, the waterfall, and every mark in order of time."""
    return Group(facts(trace), "", waterfall.table(trace), "", marks(trace))


def facts(trace: dict[str, Any]) -> Table:
    found = Table.grid(padding=(0, 2))
    state = trace["state"] + ("" if trace["live"] else ", ended")
    found.add_row("handoff", trace["handoff_id"])
    found.add_row("state", state)
    found.add_row("moved", escape(waterfall.title(trace)))
    for role in ("prefill", "decode"):
        found.add_row(role, escape(_part(trace, role)))
    if trace.get("page_server"):
        found.add_row("pages on", escape(trace["page_server"]))
    if said := handoffs.note(trace):
        found.add_row("note", escape(said))
    return found


def _part(trace: dict[str, Any], role: str) -> str:
    now, before = trace["workers"][role], trace["replicas"][role]
    name = f"{now.rpartition('@')[0]} works on it" if now else before or "nobody yet"
    return f"{name}, attempt {trace['attempts'][role]}" if trace["attempts"][role] else name


def marks(trace: dict[str, Any]) -> Table:
    found = Table("mark", box=None, pad_edge=False)
    found.add_column("at ms", justify="right")
    for name, at in trace["marks_ms"].items():
        found.add_row(name.replace("_", " "), f"{at:.1f}")
    return found
