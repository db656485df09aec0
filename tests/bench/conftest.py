"""One small system for every bench that measures one: tiny model, reference engine and MLX."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fleet import fleet
from pipeline.cli.fleet import Fleet

TINY = Path("models/tiny-llama")


@pytest.fixture(scope="package")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Pages of 4 KiB; each test asks under salts of its own."""
    if not TINY.exists():
        pytest.skip("no tiny model: `make models`")
    with fleet(TINY, ("reference", "mlx"), tmp_path_factory.mktemp("fleet"), 64) as system:
        yield system
