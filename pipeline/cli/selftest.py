"""Selftest: hand a prompt over between the engines installed on this host, in every direction, and say what came of it.

It needs nothing that is not installed: the checkpoint is a tiny random one, the broker an own Valkey, and both are gone
afterwards. `reference`, our slow and exact numpy engine, is always one of the engines.
"""

from __future__ import annotations

import argparse
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline import __version__
from pipeline.cli import demo, machine, up
from pipeline.cli.chat import ask
from pipeline.errors import CrossfillError
from pipeline.sample import tiny
from pipeline.settings import Settings

ARCH = "llama"
PROMPT = "One baker owns a large oven, the other a shop in the busiest street of the town. " * 6  # several pages
MAX_TOKENS = 8


class Result(NamedTuple):
    """One direction. `error` is what went wrong, empty when KV was handed over."""

    prefill: str
    decode: str
    trace: dict[str, Any]
    text: str = ""
    error: str = ""


def run(console: Console, timeout_s: float, chosen: Mapping[str, Path] | None = None) -> int:
    """Exit status 1 when a direction failed. `chosen` are engines and their interpreters; None: those found here."""
    engines = dict(chosen if chosen is not None else found())
    console.print(host(engines), highlight=False)
    with tempfile.TemporaryDirectory(prefix="crossfill-selftest-") as name:
        directory = Path(name)
        settings = describe(engines, tiny.write(ARCH, directory / f"tiny-{ARCH}"))
        options = argparse.Namespace(run_dir=directory / "run", timeout=timeout_s)
        with up.running(settings, options, console) as fleet:
            results = [*directions(fleet.url, settings)]
    console.print(table(results))
    failed = [result for result in results if result.error]
    verdict = (
        f"[red]{len(failed)} of {len(results)} directions failed[/]" if failed else "[green]all directions work[/]"
    )
    console.print(verdict)
    return int(bool(failed))


def found() -> dict[str, Path]:
    """What is installed here and can serve, and `reference`."""
    return {**machine.engines(Path(), Path(sys.prefix), sys.platform), "reference": Path(sys.executable)}


def host(engines: Mapping[str, Path]) -> str:
    """What a bug report should hold."""
    parts = [f"crossfill {__version__}", f"Python {platform.python_version()}", platform.platform(), platform.machine()]
    return f"{', '.join(parts)}\nengines: {', '.join(sorted(engines))}; a tiny random {ARCH}, nothing is downloaded"


def describe(engines: Mapping[str, Path], model: Path) -> Settings:
    """A worker per engine, or one per role where an engine is alone or can do no other."""
    small = {"chunk_tokens": 64, "kv_cache_bytes": 64 << 20}
    workers = [worker | {"engine_settings": small} for worker in machine.workers(engines, model)]
    return Settings.model_validate({"api": {"model": model, "port": _free_port()}, "workers": workers})


def directions(url: str, settings: Settings) -> Iterator[Result]:
    """Every ordered pair of two engines, or the only one with itself."""
    assert settings.api is not None
    for number, (prefill, decode) in enumerate(demo.directions(settings)):
        messages = [{"role": "user", "content": f"Story {number}. {PROMPT}"}]  # a prompt of its own: no prefix is held
        body = {"model": settings.api.model.name, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        yield attempt(url, body, prefill, decode)


def attempt(url: str, body: dict[str, Any], prefill: str, decode: str) -> Result:
    try:
        answer = ask(url, body, f"{prefill}->{decode}")
        text = "".join(answer)
    except CrossfillError as error:
        return Result(prefill, decode, {}, error=str(error))
    return Result(prefill, decode, answer.trace, text, _shortcoming(answer.trace))


def _shortcoming(trace: Mapping[str, Any]) -> str:
    """A silent fallback must not look like success."""
    if trace.get("recomputed"):
        return f"the decode engine computed the prompt itself: {trace['recomputed']}"
    if not trace.get("imported_tokens"):
        return "no KV was handed over"
    return ""


def table(results: list[Result]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for heading in ("", "prefill", "decode"):
        shown.add_column(heading)
    for heading in ("pages", "tokens imported", "first token"):
        shown.add_column(heading, justify="right")
    shown.add_column("what went wrong", overflow="fold")
    for result in results:
        trace, level = result.trace, "[red]fail[/]" if result.error else "[green]ok[/]"
        first = trace.get("marks_ms", {}).get("first_token")
        counts = (
            trace.get("pages", "-"),
            trace.get("imported_tokens", "-"),
            "-" if first is None else f"{first:.0f} ms",
        )
        shown.add_row(level, result.prefill, result.decode, *map(str, counts), escape(result.error))
    return shown


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
