"""One system a checkpoint family: every engine as P and as D, each in its own process, so that every page crosses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.sample import tiny
from tests.pairs.test_pairs import ENGINES, FAMILIES
from tests.ports import free_port
from tests.scenarios.conftest import required
from tests.scenarios.system import System, system, worker

READY_S = 900.0  # eight engines load at once


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
        "workers": [worker(f"{e}-{role}", e, model, role) for e in ENGINES for role in ("prefill", "decode")],
    }
    with system(settings, tmp_path_factory.mktemp("fleet"), READY_S) as running:
        yield running
