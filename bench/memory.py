"""What does a worker need over its engine? Peak memory of a worker that prefills and decodes, against the engine bare.

Bare is the same engine with the same settings in a process of its own (`bench.bare`), which computes as many prompts as
the worker does in both of its roles, as many at once. Each worker is P of one direction and D of the next, in a ring.
Both peaks are those of the requests alone: the kernel's high-water mark is reset once everything is loaded and warm.
What a worker may need more is 64 MiB and the staging of the requests in import: the pages that `docs/memory.md` allows
each of them.

    python -m bench.memory [--engines vllm,mlx,reference] [--requests 6] [--clients 4] [--tokens 200] [--answer 4]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from bench import ending, report
from bench.client import stream
from bench.fleet import engine_settings, fleet, python, versions
from bench.process import reset_peak, status_bytes
from bench.report import Target
from bench.ttft import prompt
from pipeline import checkpoint
from pipeline.broker.writer import ahead
from pipeline.cli import machine
from pipeline.cli.fleet import Fleet
from pipeline.settings import MIB, WorkerSettings

OVER_MIB = 64.0
COLUMNS = ("engine", "bare_rest_mib", "worker_rest_mib", "bare_peak_mib", "worker_peak_mib", "over_mib", "allowed_mib")


class Memory(NamedTuple):
    """Resident bytes: when everything was loaded, and at most while requests ran."""

    rest: int
    peak: int


def worker_settings(engine: str, model: Path) -> WorkerSettings:
    """As `bench.fleet` starts it."""
    made = {"name": engine, "engine": engine, "model": model, "python": python(engine)}
    return WorkerSettings.model_validate(made | {"engine_settings": engine_settings()})


@contextmanager
def bare(engine: str, model: Path) -> Iterator[subprocess.Popen[str]]:
    """It is ready."""
    settings = worker_settings(engine, model)
    argv = [str(settings.python), "-m", "bench.bare", engine, str(model), settings.engine_settings.model_dump_json()]
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, **machine.environment(settings, sys.platform), "PYTHONPATH": root}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            _await(process, "ready")
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends with its input


def _await(process: subprocess.Popen[str], word: str) -> None:
    """Engines print, too. Raises RuntimeError when it ended before it said so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise RuntimeError(f"the engine ended with status {process.wait()} before it was {word}")


def of_bare(engine: str, options: argparse.Namespace, asked: Sequence[list[int]]) -> Memory:
    with bare(engine, options.model) as process:
        assert process.stdin is not None
        rest = reset_peak(process.pid)
        work = {"prompts": asked, "answer": options.answer, "clients": options.clients}
        process.stdin.write(json.dumps(work) + "\n")
        process.stdin.flush()
        _await(process, "done")
        return Memory(rest, status_bytes(process.pid, "VmHWM"))


def of_workers(system: Fleet, options: argparse.Namespace, asked: Sequence[list[int]]) -> dict[str, Memory]:
    """Every engine's, as P of half of the prompts and as D of as many."""
    names = options.engines.split(",")
    pids = {child.name.rpartition("-")[0]: child.pid for child in system.children if child.name != "api"}
    rest = {name: reset_peak(pids[name]) for name in names}
    with httpx.Client(base_url=system.url, timeout=600) as client, ThreadPoolExecutor(options.clients) as pool:
        for p, d in zip(names, names[1:] + names[:1], strict=True):
            route = f"{p}->{d}"
            answers = [pool.submit(stream, client, options.model.name, ids, route, options.answer) for ids in asked]
            moved = [answer.result().trace["pages"] for answer in answers]
            print(f"{route}: {sum(moved)} pages moved", flush=True)
    return {name: Memory(rest[name], status_bytes(pids[name], "VmHWM")) for name in names}


def rows(alone: dict[str, Memory], working: dict[str, Memory], staging_bytes: int) -> list[dict[str, Any]]:
    allowed = OVER_MIB + staging_bytes / MIB
    return [
        {
            "engine": engine,
            "bare_rest_mib": own.rest / MIB,
            "worker_rest_mib": working[engine].rest / MIB,
            "bare_peak_mib": own.peak / MIB,
            "worker_peak_mib": working[engine].peak / MIB,
            "over_mib": (working[engine].peak - own.peak) / MIB,
            "allowed_mib": allowed,
            "reached": (working[engine].peak - own.peak) / MIB <= allowed,
        }
        for engine, own in alone.items()
    ]


def targets(found: list[dict[str, Any]]) -> list[Target]:
    return [
        Target(f"{row['engine']}: peak of a worker over its engine's", row["over_mib"], row["allowed_mib"], "MiB")
        for row in found
    ]


def staging(model: Path, clients: int) -> int:
    """Bytes that so many handoffs may have in import: the buffers that payloads are received into."""
    page_bytes = checkpoint.read_contract(model).page_shape.page_bytes
    return clients * ahead(page_bytes) * page_bytes


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = options.engines.split(",")
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    asked = [prompt(tokenizer, 1000 * options.seed + at, options.tokens) for at in range(2 * options.requests)]
    alone = {}
    for name in names:
        alone[name] = of_bare(name, options, asked)
        print(f"{name} alone: {alone[name].peak / MIB:.0f} MiB", flush=True)
    with tempfile.TemporaryDirectory() as directory, fleet(options.model, names, Path(directory), 64) as system:
        working = of_workers(system, options, asked[: options.requests])
    found = rows(alone, working, staging(options.model, options.clients))
    return {
        "question": "memory of a worker over its engine",
        "options": report.options(options),
        "engines": versions(names),
        "rows": found,
        "targets": report.rows(targets(found)),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="vllm,mlx,reference")
    parser.add_argument("--requests", type=int, default=6, help="of each direction")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--answer", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    return parser.parse_args(arguments)


def main() -> None:
    with ending.orderly():
        result = run(parse(sys.argv[1:]))
    report.table("memory, MiB", COLUMNS, [[row[column] for column in COLUMNS] for row in result["rows"]])
    report.finish("memory", result)


if __name__ == "__main__":
    main()
