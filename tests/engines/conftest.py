"""One engine per (name, checkpoint), loaded once and shared by the whole contract suite.

An engine that cannot be imported here is skipped with its reason, unless CROSSFILL_REQUIRE_ENGINES (comma
separated names) says that it must be there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline import checkpoint
from pipeline.engines import ENGINES, load
from pipeline.engines.base import Engine, EngineStats
from pipeline.engines.reference import ReferenceEngine
from pipeline.engines.reference.model import Model
from pipeline.errors import ConfigError
from pipeline.page import PageShape
from pipeline.sample import tiny
from pipeline.settings import EngineSettings, Role
from tests.engines.flow import Oracle, settles

ARCHITECTURES = ("llama", "qwen2", "qwen3")
MODELS = Path(__file__).parents[2] / "models"
POOL_PAGES = 120  # less than the context of 8192 tokens needs, so that a prompt can be too long for the pool
HELD_PAGES = 16


class Case(NamedTuple):
    """Which engine, on which tiny checkpoint, in which role."""

    engine: str
    arch: str
    role: Role = "both"

    def __str__(self) -> str:
        return f"{self.engine}-{self.arch}" + ("" if self.role == "both" else f"-{self.role}")


# SGLang serves one role at a time: its two halves are two engines to the suite.
ROLES: dict[str, tuple[Role, ...]] = {"sglang": ("prefill", "decode")}
CASES = [Case(name, arch, role) for name in ENGINES for role in ROLES.get(name, ("both",)) for arch in ARCHITECTURES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test runs on engines that have both roles, and with the mark `role(...)` on those that have this one alone."""
    own = any(mark.args[0] == "case" for mark in metafunc.definition.iter_markers("parametrize"))
    if "case" in metafunc.fixturenames and not own:
        mark = metafunc.definition.get_closest_marker("role")
        roles = {"both", *(mark.args if mark else ())}
        cases = [case for case in CASES if case.role in roles]
        metafunc.parametrize("case", cases, indirect=True, ids=str, scope="session")


def suite_settings(directory: Path, role: Role = "both") -> EngineSettings:
    """The smallest chunk, and a pool that a few prompts fill."""
    config = checkpoint.read_config(directory)
    page = PageShape(config.layers, config.kv_heads, config.head_dim)
    return EngineSettings(
        role=role,
        chunk_tokens=64,
        max_running=16,
        kv_cache_bytes=POOL_PAGES * page.page_bytes,
        prefix_cache_bytes=POOL_PAGES * page.page_bytes,
        held_pages=HELD_PAGES,
    )


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny checkpoint of every architecture: those made by the developer, else fresh ones."""
    made = tmp_path_factory.mktemp("models")
    return {
        arch: MODELS / f"tiny-{arch}"
        if (MODELS / f"tiny-{arch}" / "config.json").exists()
        else tiny.write(arch, made / f"tiny-{arch}")
        for arch in ARCHITECTURES
    }


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture(scope="session")
def directory(case: Case, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[case.arch]


@pytest.fixture(scope="session")
def shared_engine(case: Case, directory: Path) -> Iterator[Engine]:
    engine = load_or_skip(case.engine, directory, suite_settings(directory, case.role))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def twin(directory: Path) -> Iterator[Engine]:
    """The reference engine on the same checkpoint: the other side of every handoff."""
    engine = ReferenceEngine(directory, suite_settings(directory))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def oracle(directory: Path) -> Oracle:
    return Oracle(Model.load(directory))


@pytest.fixture
def baseline(shared_engine: Engine) -> EngineStats:
    """The gauges at rest, before the test."""
    return shared_engine.stats()


@pytest.fixture
def engine(shared_engine: Engine, twin: Engine, baseline: EngineStats) -> Iterator[Engine]:
    """The engine under test, at rest and with nothing cached; it must be at rest again after every test."""
    shared_engine.reset_prefix_cache()
    twin.reset_prefix_cache()
    yield shared_engine
    assert settles(shared_engine, baseline), f"{shared_engine.stats()} is not {baseline}"


def load_or_skip(name: str, directory: Path, settings: EngineSettings) -> Engine:
    try:
        return load(name, directory, settings)
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        if name in os.environ.get("CROSSFILL_REQUIRE_ENGINES", "").split(","):
            pytest.fail(f"{name} is required by CROSSFILL_REQUIRE_ENGINES: {error}")
        pytest.skip(str(error))
