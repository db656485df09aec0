"""One rig for every fault that it survives: starting five processes takes longer than most faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.sample import tiny
from tests.faults.rig import Rig, rig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tiny_model, tmp_path_factory.mktemp("rig")) as started:
        yield started


@pytest.fixture
def hurt(running: Rig) -> Iterator[Rig]:
    """The rig, at rest before and after: whatever the test did to it, every invariant holds again."""
    yield running
    running.rest()
