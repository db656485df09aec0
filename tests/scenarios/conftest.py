"""Two systems of real processes for the whole session: a cheap one, and one with every real engine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import machine
from pipeline.sample import tiny
from tests.ports import free_port
from tests.scenarios.system import System, system, worker

MODEL = Path("models/smollm2-135m")
LEASE_S = 3.0


def required(engine: str) -> None:
    """Skip where `engine` is not installed, fail where the run says it must be."""
    if engine in machine.interpreters(Path(), Path(sys.prefix)) or engine == "reference":
        return
    if engine in os.environ.get("CROSSFILL_REQUIRE_ENGINES", "").split(","):
        pytest.fail(f"{engine} must be installed for this run (CROSSFILL_REQUIRE_ENGINES)")
    pytest.skip(f"{engine} is not installed")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def _cheap(model: Path, policy: str, folder: Path) -> dict[str, Any]:
    """One `reference` replica in each role and a budget of a few tiny pages."""
    engine = {"chunk_tokens": 64}
    return {
        "api": {"model": model, "port": free_port()},
        "broker": {"budget_bytes": 1 << 18},
        "capture": {"folder": folder / "captures"},
        "routing": {"policy": "handoff"},
        "handoff": {"failure_policy": policy, "queue_s": 60, "accept_s": 60, "progress_s": 10, "retries": 0},
        "workers": [
            worker("ref-p", "reference", model, "prefill", lease_s=LEASE_S, engine_settings=engine),
            worker("ref-d", "reference", model, "decode", lease_s=LEASE_S, engine_settings=engine),
        ],
    }


@pytest.fixture(scope="session")
def cheap(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two `reference` replicas under policy `fail`: what goes wrong is seen."""
    folder = tmp_path_factory.mktemp("cheap")
    with system(_cheap(tiny_model, "fail", folder), folder) as running:
        yield running


@pytest.fixture(scope="module")
def lenient(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The same under policy `recompute`, the default."""
    folder = tmp_path_factory.mktemp("lenient")
    with system(_cheap(tiny_model, "recompute", folder), folder) as running:
        yield running


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """vLLM, MLX and `reference` on the real model, each able to do both roles; 8 MiB of budget, policy `fail`."""
    for engine in ("vllm", "mlx"):
        required(engine)
    if not (MODEL / "config.json").exists():
        pytest.fail(f"{MODEL} is missing: make models")
    assert importlib.util.find_spec("openai"), "the dev extra is not installed"
    folder = tmp_path_factory.mktemp("real")
    settings = {
        "api": {"model": MODEL, "port": free_port()},
        "broker": {"budget_bytes": 8 << 20},
        "capture": {"folder": folder / "captures"},
        "routing": {"policy": "handoff"},
        "handoff": {"failure_policy": "fail"},
        "workers": [worker(f"{engine}-0", engine, MODEL) for engine in ("vllm", "mlx", "reference")],
    }
    with system(settings, folder) as running:
        yield running
