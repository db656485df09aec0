"""`crossfill queues`: the jobs of every queue by where they are, and who takes from it."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from pipeline import routing
from pipeline.broker.operator import Operator
from pipeline.cli import view

Rows = list[dict[str, Any]]
STATES = ("queued", "started", "finished", "failed", "cancelled")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    view.add_look(
        commands, "queues", "show the jobs of every queue by where they are", lambda operator, _: look(operator), table
    )


def look(operator: Operator) -> Rows:
    """One row per queue that a replica takes from or that ever had a job."""
    takers: dict[str, list[str]] = {}
    for replica in operator.replicas():
        for name in routing.queues(replica):
            takers.setdefault(name, []).append(replica.name)
    found = operator.queues(takers)
    return [{"queue": name, **tally._asdict(), "replicas": takers.get(name, [])} for name, tally in found.items()]


def table(rows: Rows) -> Table:
    found = Table(title="queues", title_justify="left", box=None)
    found.add_column("queue", overflow="fold")
    for state in STATES:
        found.add_column(state, justify="right")
    found.add_column("taken by")
    for row in rows:
        lost = not row["replicas"] and row["queued"]
        takers = ", ".join(row["replicas"]) or ("nobody" if lost else "-")
        found.add_row(row["queue"], *(str(row[state]) for state in STATES), takers, style="red" if lost else None)
    return found
