"""`crossfill status`: replicas, budget and live handoffs of a running API."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.cli.client import fetch
from pipeline.errors import ConfigError

COLUMNS = ("name", "engine", "role", "model", "slots")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("status", help="show replicas, budget and live handoffs of a running API")
    command.add_argument("--url", default="http://127.0.0.1:8000", help="of the API (default http://127.0.0.1:8000)")
    command.add_argument("--json", action="store_true", help="the API's own JSON")
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> None:
    status = fetch(f"{options.url}/status")
    if status is None:
        raise ConfigError(f"no Crossfill API answers at {options.url}: start one, or pass --url")
    console = Console()
    if options.json:
        print(json.dumps(status, indent=2))
        return
    console.print(replicas(status))
    for name in sorted(status.keys() - {"replicas"}):
        console.print(f"{name}: {_inline(status[name])}", highlight=False)


def replicas(status: Mapping[str, Any]) -> Table:
    """One row per replica: who it is, what runs on it, the engine's own gauges."""
    table = Table(*COLUMNS, "running", "engine gauges", title="replicas", title_justify="left", box=None)
    for replica in status["replicas"]:
        cells = [str(replica.get(column, "")) for column in COLUMNS]
        table.add_row(*cells, _inline(replica.get("load", {})), _inline(replica.get("stats", {})))
    return table


def _inline(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_inline, value)) or "none"
    return str(value)
