"""The bench of the HTTP edge: a small run of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import api

TINY = Path("models/tiny-llama")


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.skipif(not TINY.exists(), reason="no tiny model: `make models`")
def test_a_small_run() -> None:
    words = f"--model {TINY} --requests 8 --streams 3 --tokens 6 --rate 50 --idle-s 0.2"
    rows = api.run(api.parse(words.split()))
    assert list(rows) == ["crossfill"]
    row = rows["crossfill"]
    assert row["tokens_per_s"] > 0
    assert 0 <= row["gap_median_ms"] <= row["gap_p99_ms"] <= row["gap_max_ms"]
