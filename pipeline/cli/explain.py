"""`crossfill explain`: what each way would cost a prompt of a given length, as the API's router sees it now."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from rich.console import Console
from rich.table import Table

from pipeline.cli.client import fetch
from pipeline.errors import ConfigError

COLUMNS = ("total_ms", "queue_ms", "prefill_ms", "exposed_ms")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("explain", help="show what each way would cost a prompt, and which one is chosen")
    command.add_argument("--url", default="http://127.0.0.1:8000", help="of the API (default http://127.0.0.1:8000)")
    command.add_argument("--tokens", type=int, default=1024, help="length of the prompt (default 1024)")
    command.add_argument("--model", help="served model (default: the API's)")
    command.add_argument("--json", action="store_true", help="the API's own JSON")
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> None:
    asked = {"tokens": options.tokens} | ({"model": options.model} if options.model else {})
    found = fetch(f"{options.url}/explain?{urlencode(asked)}")
    if found is None:
        raise ConfigError(f"{options.url} explains nothing: no Crossfill API there, or a model or length it refuses")
    if options.json:
        print(json.dumps(found, indent=2))
    elif found["ways"]:
        Console().print(table(found))
    else:
        print(f"no replica could serve a prompt of {found['tokens']} tokens for {found['model']}")


def table(found: Mapping[str, Any]) -> Table:
    """One row per way, the chosen one first; a way not tried near this length has a question mark."""
    title = f"{found['model']}, {found['tokens']} tokens: time to first token"
    shown = Table("way", *COLUMNS, "", title=title, title_justify="left", box=None)
    for way in found["ways"]:
        note = ("chosen" if way["chosen"] else "") + ("" if way["known"] else " ?")
        shown.add_row(way["way"], *(f"{way[column]:.1f}" for column in COLUMNS), note.strip())
    return shown
