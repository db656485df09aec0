"""`crossfill up`: everything of a one-machine set-up, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from pipeline.cli import config, machine
from pipeline.cli.config import Tree
from pipeline.cli.fleet import Fleet
from pipeline.cli.progress import StartProgress
from pipeline.cli.supervisor import Supervisor
from pipeline.settings import Settings

READY_TIMEOUT_S = 300.0  # a first vLLM start builds caches for over a minute


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("up", help="start broker, workers and API of this machine, and keep them running")
    add_flags(command)
    command.set_defaults(handler=run)


def add_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, help="settings file (default: crossfill.toml, else what is found here)")
    command.add_argument("--model", type=Path, help=f"checkpoint without a settings file (default {machine.MODEL})")
    command.add_argument("--broker", metavar="URL", help="use this Redis/Valkey instead of an own Valkey")
    command.add_argument("--port", type=int, help="port of the API (default 8000)")
    command.add_argument("--run-dir", type=Path, default=Path(".run"), help="logs and broker files (default .run)")
    command.add_argument("--timeout", type=float, default=READY_TIMEOUT_S, help="seconds to wait for readiness")


def run(options: argparse.Namespace) -> int:
    console = Console()
    with running(settings(options), options, console) as fleet:
        console.print(f"\nCrossfill serves at [bold]{fleet.url}/v1[/]. Try:\n\n{example(fleet)}\n", soft_wrap=True)
        console.print("Ctrl-C stops everything.")
        return watch(fleet, console)


def settings(options: argparse.Namespace) -> Settings:
    """From a file where there is one, else for the engines found on this machine. Raises ConfigError."""
    file = config.find(options.config)
    tree: Tree = config.read(file) if file else {}
    if not file:
        found = machine.describe(options.model or machine.MODEL, Path(), Path(sys.prefix), sys.platform)
        tree = found.model_dump(exclude_unset=True)
    tree = config.merge(tree, config.from_environment(os.environ))
    return config.validate(config.merge(tree, _flags(options)), source=str(file or "the set-up found here"))


def _flags(options: argparse.Namespace) -> Tree:
    tree: Tree = {}
    if options.broker:
        tree["broker"] = {"url": options.broker}
    if options.port is not None:
        tree["api"] = {"port": options.port}
    return tree


@contextmanager
def running(settings: Settings, options: argparse.Namespace, console: Console) -> Iterator[Fleet]:
    """A fleet that is ready; stopped in order on the way out, whatever the reason. SIGTERM counts as Ctrl-C."""
    fleet = Fleet(settings, options.run_dir, os.environ)
    with _signals_interrupt():
        try:
            _bring_up(fleet, console, options.timeout)
            yield fleet
        finally:
            _stop(fleet, console)


def _bring_up(fleet: Fleet, console: Console, timeout_s: float) -> None:
    fleet.start()
    with StartProgress(console, fleet.children) as progress:
        for ready in fleet.wait_ready(timeout_s):
            progress.update(ready)


def _stop(fleet: Fleet, console: Console) -> None:
    """A second Ctrl-C while waiting ends the patience, not the clean-up."""
    if not fleet.children:
        fleet.stop()
        return
    console.print("stopping: API, workers, broker")
    try:
        killed = fleet.stop()
    except KeyboardInterrupt:
        killed = fleet.stop(grace_s=0.5)
    console.print(f"stopped; had to kill {', '.join(killed)}" if killed else "stopped")


def watch(fleet: Fleet, console: Console, sleep: Callable[[float], None] = time.sleep) -> int:
    """Bring back children that end, until interrupted (0) or until nothing is left that could serve (1)."""

    def say(text: str) -> None:
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)

    supervisor = Supervisor(fleet, say)
    try:
        while supervisor.tend():
            sleep(0.5)
    except KeyboardInterrupt:
        return 0
    console.print("nothing is left that could serve a request")
    return 1


def example(fleet: Fleet) -> str:
    """One command to copy."""
    api = fleet.settings.api
    assert api is not None  # Fleet refuses settings without it
    name = api.served_name or api.model.name
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    return f"curl {fleet.url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGINT too: a shell starts what runs in its background with SIGINT ignored, and that is inherited."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
