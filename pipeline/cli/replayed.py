"""`python -m pipeline.cli.replayed decode|prefill FILE OUT`: one engine's part of a replay, in its own environment.

The worker's settings come as JSON on standard input; what was found is written to OUT: a JSON report of `decode`, a
capture of `prefill`. Started by `replay.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from pipeline import engines
from pipeline.cli import stored
from pipeline.engines.base import Engine
from pipeline.errors import CrossfillError
from pipeline.settings import WorkerSettings
from pipeline.stages import archive, replay

_SPARE = 4  # times what the prompt takes: FP32 caches and growth in steps on a CPU


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("decode", "prefill"))
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--first-token", action="store_true")
    options = parser.parse_args()
    try:
        with closing(_engine(WorkerSettings.model_validate_json(sys.stdin.read()), options.file)) as engine:
            (_decode if options.what == "decode" else _prefill)(engine, options)
    except CrossfillError as error:
        print(f"crossfill: {error}", file=sys.stderr)
        return 1
    return 0


def _engine(worker: WorkerSettings, file: Path) -> Engine:
    """With room for this one handoff, however long its prompt."""
    with stored.open_capture(file) as reader:
        capture = reader.capture
    sampling = capture.request.sampling
    pages = (capture.prompt_tokens + sampling.max_tokens * sampling.n) // capture.contract.page_tokens + 2
    room_bytes = _SPARE * pages * capture.contract.page_shape.page_bytes
    chosen = worker.engine_settings
    update = {"role": worker.role, "kv_cache_bytes": max(chosen.kv_cache_bytes, room_bytes)}
    return engines.load(worker.engine, worker.model, chosen.model_copy(update=update))


def _decode(engine: Engine, options: argparse.Namespace) -> None:
    with stored.open_capture(options.file) as reader:
        capture = reader.capture
        verdicts = replay.compare(capture, engine.name, replay.decode(engine, capture, reader.pages()))
    report = {
        "recorded_on": capture.engine,
        "engine": engine.name,
        "samples": [asdict(one) | {"fault": one.fault, "compared": one.compared} for one in verdicts],
    }
    options.out.write_text(json.dumps(report), encoding="utf-8")


def _prefill(engine: Engine, options: argparse.Namespace) -> None:
    with stored.open_capture(options.file) as reader:
        capture = reader.capture
    again, pages = replay.prefill(engine, capture, first_token=True if options.first_token else None)
    archive.write(options.out.parent, again, pages, options.out.name)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # everything is closed; taking down an interpreter full of torch lasts ten seconds
