"""`crossfill replicas`: who is alive, what it can do, how busy it is."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from pipeline.broker.operator import Operator
from pipeline.cli import view

Rows = list[dict[str, Any]]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    view.add_look(commands, "replicas", "show the replicas that are alive", lambda operator, _: look(operator), table)


def look(operator: Operator) -> Rows:
    """The registry's records, with the age of each and its contract's digest."""
    now_ms = operator.now_ms()
    return [
        asdict(replica)
        | {"features": sorted(replica.features), "digest": replica.contract.digest}
        | {"pages": replica.pages and replica.pages._asdict()}
        | {"up_ms": round(now_ms - replica.started_ms)}
        for replica in operator.replicas()
    ]


def table(rows: Rows) -> Table:
    found = Table(title="replicas", title_justify="left", box=None)
    for heading in ("name", "engine", "role", "model", "contract", "state"):
        found.add_column(heading, overflow="fold")
    for heading in ("prefilling", "decoding", "slots", "held pages", "cached", "free", "up"):
        found.add_column(heading, justify="right")
    for row in rows:
        load, stats = row["load"], row["stats"]
        who = (row["name"], row["engine"], row["role"], row["model"], row["digest"][:8], state(row))
        counts = (load.get("prefill_running", "-"), load.get("decode_running", "-"), row["slots"])
        pages = (stats.get(name, "-") for name in ("held_pages", "cached_pages", "free_pages"))
        found.add_row(*map(escape, who), *map(str, (*counts, *pages)), view.ago(row["up_ms"]))
    return found


def state(row: dict[str, Any]) -> str:
    """`serving`, `draining` (finishing what it has), `drained`, or `no page server`."""
    load = row["load"]
    if load.get("page_server_down"):
        return "no page server"
    if not load.get("draining"):
        return "serving"
    return "draining" if load.get("prefill_running") or load.get("decode_running") else "drained"
