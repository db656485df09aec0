"""Fleet: the system under measurement, started as `crossfill up` starts it, each engine in its own process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.cli import machine
from pipeline.cli.fleet import Fleet
from pipeline.settings import Settings

READY_S = 300.0


@contextmanager
def fleet(model: Path, engines: Sequence[str], directory: Path, budget_mib: int) -> Iterator[Fleet]:
    """One replica of each engine, both roles, policy `fail`: a silent recompute would be measured as a handoff."""
    pythons = machine.engines(Path(), Path(sys.prefix), sys.platform) | {"reference": Path(sys.executable)}
    workers = [{"name": f"{e}-0", "engine": e, "model": model, "python": pythons[e]} for e in engines]
    settings = Settings.model_validate(
        {
            "api": {"model": model, "port": free_port()},
            "broker": {"budget_bytes": budget_mib << 20},
            "handoff": {"failure_policy": "fail"},
            "workers": workers,
        }
    )
    system = Fleet(settings, directory, os.environ)
    try:
        system.start()
        for _ in system.wait_ready(READY_S):
            pass
        yield system
    finally:
        system.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
