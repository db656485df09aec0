"""`crossfill replay FILE`: decode a stored handoff again on any engine, compute its pages again, or ask it again.

An engine lives in an environment of its own: it runs in a child process there (`replayed.py`), and what it found comes
back as a file. The file is verified to its end before anything is done with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.cli import config, machine, stored
from pipeline.engines import ENGINES
from pipeline.errors import ConfigError, EngineError
from pipeline.settings import Role, WorkerSettings

_SHOWN_ERROR_LINES = 12


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("replay", help="decode a stored handoff again, compute it again, or ask it again")
    command.add_argument("file", type=Path, metavar="FILE", help="a .handoff file")
    command.add_argument("--engine", choices=sorted(ENGINES), help="import the pages into this engine and decode")
    command.add_argument("--prefill", choices=sorted(ENGINES), help="compute the pages on this one and compare them")
    command.add_argument("--to", metavar="URL", help="ask a running API the same: it computes everything anew")
    command.add_argument("--model", type=Path, help=f"checkpoint (default: that of the settings, else {machine.MODEL})")
    command.add_argument(
        "--config", type=Path, help="settings with the engines' environments (default: crossfill.toml)"
    )
    command.add_argument("--save", type=Path, metavar="OUT", help="of --prefill: keep the new capture")
    command.add_argument("--route", help="of --to: PREFILL->DECODE, else the API chooses")
    command.add_argument("--json", action="store_true", help="JSON instead of tables")
    stored.add_flags(command)
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> int:
    """The exit status: 1 when something differs that rounding does not explain."""
    if not (options.engine or options.prefill or options.to):
        raise ConfigError("say where: --engine ENGINE, --prefill ENGINE or --to URL")
    capture = stored.load(options.file)
    status = 0
    with tempfile.TemporaryDirectory(prefix="crossfill-replay-") as folder:
        file = options.file
        if options.prefill:
            file = options.save or Path(folder) / "again.handoff"
            status |= _prefill(options, file)
        if options.engine:
            status |= _decode(options, file, Path(folder))
    if options.to:
        from pipeline.cli import reinject  # here: the other ways talk to nobody

        status |= reinject.run(options, capture)
    return status


def _prefill(options: argparse.Namespace, out: Path) -> int:
    # Only SGLang wants the first token with the pages; --prefill exists to make up for a capture without it.
    extra = ["--first-token"] if options.engine == "sglang" else []
    _child(options, options.prefill, "prefill", options.file, out, extra)
    with stored.open_capture(out) as ours, stored.open_capture(options.file) as theirs:
        found = stored.compare(ours, theirs, options.tolerance)
    stored.report(found, options, f"pages computed again on {options.prefill} against the recorded ones")
    return 1 if found.first else 0


def _decode(options: argparse.Namespace, file: Path, folder: Path) -> int:
    report = folder / "report.json"
    _child(options, options.engine, "decode", file, report)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(table(found))
    return 1 if any(one["fault"] for one in found["samples"]) else 0


def table(found: dict[str, Any]) -> Table:
    """One row a sample: how far the texts agree, and what to think of where they part."""
    title = f"recorded on {found['recorded_on']}, replayed on {found['engine']}"
    view = Table("sample", "tokens compared", title=escape(title), title_justify="left", box=None)
    view.add_column("verdict", overflow="fold")
    for at, one in enumerate(found["samples"]):
        view.add_row(str(at), str(one["compared"]), verdict(one))
    return view


def verdict(one: dict[str, Any]) -> str:
    error = one["logprob_error"]
    beside = "" if error is None else f"; log-probabilities within {error:.3g}"
    if one["parted"] is None:
        return f"[green]the same tokens[/]{beside}" if one["compared"] else "no token was recorded: nothing to compare"
    margin = "unknown" if one["margin"] is None else f"{one['margin']:.3g}"
    where = (
        f"they part at token {one['parted']}: recorded {one['recorded'][one['parted']]}, replayed "
        f"{one['replayed'][one['parted']]} (margin of the best two: {margin})"
    )
    if not one["comparable"]:
        return f"sampled, on another engine or without a seed: texts need not agree; {where}{beside}"
    return f"[red]DIFFERENT[/]: {where}{beside}" if one["fault"] else f"[yellow]a near tie[/]: {where}{beside}"


def _child(
    options: argparse.Namespace, engine: str, what: str, file: Path, out: Path, extra: list[str] | None = None
) -> None:
    """Run one engine in its own environment. Raises EngineError with what it said last, ConfigError."""
    worker = _worker(options, engine, "prefill" if what == "prefill" else "decode")
    settings = worker.model_dump_json()
    command = [str(worker.python), "-m", "pipeline.cli.replayed", what, str(file), str(out), *(extra or [])]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        done = subprocess.run(
            command,
            input=settings,
            text=True,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **machine.environment(worker, sys.platform)},
            check=False,
        )
        if done.returncode:
            log.seek(0)
            lines = [line.rstrip() for line in log if line.strip()]
            ours = next((line for line in reversed(lines) if line.startswith("crossfill: ")), None)
            said = ours.removeprefix("crossfill: ") if ours else "\n".join(lines[-_SHOWN_ERROR_LINES:])
            raise EngineError(f"the replay on {engine} ended with status {done.returncode}: {said}")


def _worker(options: argparse.Namespace, engine: str, role: Role) -> WorkerSettings:
    """The settings' worker of that engine where there is one, in this role; else the engine as it is found here."""
    file = config.find(options.config)
    settings = config.load(file, os.environ) if file else None
    known = next((one for one in settings.workers if one.engine == engine), None) if settings else None
    found = machine.interpreters(Path(), Path(sys.prefix)) | {"reference": Path(sys.executable)}
    python = (known.python if known else None) or found.get(engine)
    if python is None:
        raise ConfigError(f"{engine} is not installed here: `crossfill doctor` says what is")
    model = options.model or (known.model if known else machine.MODEL)
    if not (model / "config.json").exists():
        raise ConfigError(f"no checkpoint in {model}: pass --model with the one that the capture is of")
    base = known.model_dump(exclude_unset=True) if known else {"name": "replay", "engine": engine}
    return WorkerSettings.model_validate(base | {"role": role, "model": model, "python": python})
