"""One system a checkpoint family: every engine in every role it has, each in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.sample import tiny
from tests.pairs.test_pairs import FAMILIES
from tests.ports import free_port
from tests.scenarios.conftest import required
from tests.scenarios.system import System, system, worker

ENGINES = ("vllm", "sglang", "mlx", "reference")


def _workers(model: Path) -> list[dict[str, Any]]:
    """SGLang has one role per process; the others have both in one."""
    both = [worker(f"{engine}-0", engine, model) for engine in ("vllm", "mlx", "reference")]
    return both + [worker(f"sglang-{role}", "sglang", model, role) for role in ("prefill", "decode")]


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="session")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(family, tmp_path_factory.mktemp("pairs") / f"tiny-{family}")


@pytest.fixture(scope="session")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    for engine in ENGINES:
        required(engine)
    settings = {
        "api": {"model": model, "port": free_port()},
        "broker": {"budget_bytes": 8 << 20},
        "handoff": {"failure_policy": "fail"},
        "workers": _workers(model),
    }
    with system(settings, tmp_path_factory.mktemp("fleet")) as running:
        yield running
