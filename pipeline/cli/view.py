"""View: what the commands that look into a running system share: which broker, one look or many, table or JSON.

They talk to the broker alone, so they work while no API is up.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from pipeline.broker.connect import connect
from pipeline.broker.operator import Operator
from pipeline.cli import config
from pipeline.cli.config import Tree
from pipeline.errors import BrokerError
from pipeline.settings import Settings

RUN_FILE = Path(".run/settings.json")  # what `crossfill up` here tells its children: its own broker's URL is in it
T = TypeVar("T")


def add_broker_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, help=f"settings file (default: crossfill.toml, else {RUN_FILE})")
    command.add_argument("--broker", "--url", metavar="URL", help="redis:// or rediss:// URL of the control broker")


def add_flags(command: argparse.ArgumentParser) -> None:
    """Those of a command that shows something."""
    add_broker_flags(command)
    command.add_argument("--json", action="store_true", help="JSON instead of a table; with --watch one line a look")
    command.add_argument(
        "--watch", type=float, nargs="?", const=1.0, metavar="SECONDS", help="look again every second (or SECONDS)"
    )


def add_look(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    look: Callable[[Operator, argparse.Namespace], T],
    draw: Callable[[T], RenderableType],
) -> argparse.ArgumentParser:
    """A command that looks and draws; further arguments may be added to it."""

    def run(options: argparse.Namespace) -> None:
        with operator(options) as found:
            show(options, lambda: look(found, options), draw)

    command = commands.add_parser(name, help=summary)
    add_flags(command)
    command.set_defaults(handler=run)
    return command


def settings(options: argparse.Namespace) -> Settings:
    """Of file, environment and flags. Where none names a broker, that of a `crossfill up` in this directory counts."""
    flags: Tree = {"broker": {"url": options.broker}} if options.broker else {}
    found = config.load(config.find(options.config), os.environ, flags)
    if "url" in found.broker.model_fields_set or options.config or not RUN_FILE.exists():
        return found
    return config.load(RUN_FILE, os.environ, flags)


@contextmanager
def operator(options: argparse.Namespace) -> Iterator[Operator]:
    """Raises ConfigError; BrokerError comes with the first call."""
    chosen = settings(options)
    with connect(chosen.broker.url) as client:
        yield Operator(client, chosen)


def show(options: argparse.Namespace, look: Callable[[], T], draw: Callable[[T], RenderableType]) -> None:
    """Once, or again and again until Ctrl-C. `look` returns what can be JSON. Raises BrokerError unless it watches."""
    console = Console()
    if options.watch is None:
        found = look()
        if options.json:
            print(json.dumps(found, indent=2))
        else:
            console.print(draw(found))
    elif options.json:
        _repeat(options.watch, lambda: print(json.dumps(look()), flush=True))
    else:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            _repeat(options.watch, lambda: live.update(_drawn(look, draw), refresh=True))


def _repeat(seconds: float, step: Callable[[], object]) -> None:
    try:
        while True:
            step()
            time.sleep(seconds)
    except KeyboardInterrupt:
        return


def _drawn(look: Callable[[], T], draw: Callable[[T], RenderableType]) -> RenderableType:
    """A broker that is away for a moment does not end the watch."""
    try:
        return draw(look())
    except BrokerError as error:
        return Text(str(error), style="red")


def ago(ms: float) -> str:
    """A span for people."""
    seconds = max(0.0, ms / 1000)
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def mib(size: float) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def route(trace: dict[str, Any]) -> str:
    """`vllm->mlx`, or `local:mlx` where D computes the prompt itself."""
    chosen = trace["route"]
    prefill = chosen.get("prefill_engine")
    decode = chosen.get("decode_engine") or chosen.get("decode_replica")
    return f"{prefill}->{decode}" if prefill else f"local:{decode}"
