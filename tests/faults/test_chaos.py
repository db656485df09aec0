"""One short seed of chaos on the rig; `make chaos` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import run
from tests.faults.rig import Rig

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_a_short_run_breaks_no_invariant(running: Rig, tmp_path: Path) -> None:
    verdict = run(running, 5, tmp_path / "history.jsonl", seconds=12, requests=150, pace_s=0.8)
    assert verdict.violations == []
    assert verdict.summary.requests >= 8  # of each client at least one
    assert verdict.summary.outcomes["right"] > 0
    assert len(verdict.summary.faults) >= 3
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) > 2 * verdict.summary.requests
