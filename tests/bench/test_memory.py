"""The memory bench: what is compared, and a small run of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import memory
from bench.memory import Memory
from pipeline.cli.fleet import Fleet
from pipeline.settings import MIB

TINY = Path("models/tiny-llama")


def test_peaks_are_compared_and_staging_is_allowed() -> None:
    alone = {"a": Memory(100 * MIB, 300 * MIB), "b": Memory(50 * MIB, 60 * MIB)}
    working = {"a": Memory(150 * MIB, 374 * MIB), "b": Memory(110 * MIB, 135 * MIB)}
    one, other = memory.rows(alone, working, staging_bytes=10 * MIB)
    assert (one["over_mib"], one["allowed_mib"], one["reached"]) == (74.0, 74.0, True)
    assert (other["over_mib"], other["reached"]) == (75.0, False)
    assert [target.reached for target in memory.targets([one, other])] == [True, False]


@pytest.mark.skipif(not TINY.exists(), reason="no tiny model: `make models`")
def test_staging_is_what_a_reader_holds() -> None:
    page_bytes = 2 * 2 * 2 * 64 * 32 * 2  # two layers, K and V, two heads of 32
    assert memory.staging(TINY, 3) == 3 * 16 * page_bytes  # 16 pages of each, as docs/memory.md says


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_small_run(small: Fleet) -> None:
    words = "--engines reference,mlx --model models/tiny-llama --requests 2 --clients 2 --answer 2"
    options, asked = memory.parse(words.split()), [[1, 2, 3] * 20, [4] * 70]
    own = memory.of_bare("reference", options, asked)
    assert 0 < own.rest <= own.peak
    working = memory.of_workers(small, options, asked)
    assert list(working) == ["reference", "mlx"]
    # broker, RQ and metrics are in a worker's process and not in an engine's
    assert working["reference"].rest > own.rest


def test_an_engine_that_ends_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="before it was ready"), memory.bare("reference", tmp_path):
        pass
