"""Own: the decode engine's own server for the same requests, with the engine set up as our worker does it.

vLLM's alone. mlx-lm's server computes in the checkpoint's FP16, which takes a CPU five times as long as our FP32: a
comparison with it would flatter us.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench import process
from bench.fleet import KV_BYTES, READY_S, free_port, python
from pipeline.cli import child as children
from pipeline.cli import machine
from pipeline.cli.child import Child
from pipeline.cli.client import fetch
from pipeline.page import PAGE_TOKENS
from pipeline.settings import WorkerSettings

ENGINES = ("vllm",)
RUNNING = 16  # requests in the engine at once: what our workers' default is


class Own(NamedTuple):
    """A server that answers. `engine_pids`: the processes that schedule and compute; the HTTP edge is another,
    `api_pid`."""

    url: str
    engine_pids: frozenset[int]
    api_pid: int


@contextmanager
def server(model: Path, directory: Path) -> Iterator[Own]:
    """Beside our CPU workers. Raises RuntimeError when it ends, or is not ready in time."""
    interpreter = python("vllm")
    settings = WorkerSettings.model_validate({"name": "own", "engine": "vllm", "model": model, "python": interpreter})
    env = machine.environment(settings, sys.platform) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": str(2 * KV_BYTES >> 30)}
    with launched(interpreter, model, RUNNING, ["--dtype", _dtype(), "--enforce-eager"], env, directory) as own:
        yield own


@contextmanager
def launched(
    interpreter: Path, model: Path, running: int, more: Sequence[str], env: Mapping[str, str], directory: Path
) -> Iterator[Own]:
    """With `more` arguments and variables of `env` beside our own. Raises RuntimeError as `server`."""
    port = free_port()
    argv = [str(interpreter), "-m", "bench.own_vllm", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--model", str(model), "--served-model-name", model.name, "--generation-config", "vllm"]
    argv += ["--block-size", str(PAGE_TOKENS), "--max-num-seqs", str(running), *more]
    env = {**os.environ, **env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    own = Child("vllm-own", argv, env, directory / "vllm-own.log")
    try:
        yield Own(f"http://127.0.0.1:{port}", _ready(own, f"http://127.0.0.1:{port}/version"), own.pid)
    finally:
        children.stop([own], 10)


def _ready(own: Child, probe: str) -> frozenset[int]:
    """The processes below it."""
    deadline = time.monotonic() + READY_S
    while fetch(probe) is None:
        if own.status is not None or time.monotonic() > deadline:
            raise RuntimeError(own.epitaph())
        time.sleep(0.5)
    return frozenset(process.below(own.pid))


def _dtype() -> str:
    """Where the processor has no FP16 product vLLM's FP16 takes seven times as long as its FP32, which our worker's
    widened layers are as fast as."""
    flags = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    return "float16" if "avx512" in flags or Path("/dev/nvidia0").exists() else "float32"
