"""`docs/metrics.md` is what the table of families says today."""

from __future__ import annotations

from docs import generate_metrics
from pipeline.metrics import API, WORKER


def test_the_page_is_current() -> None:
    assert generate_metrics.PAGE.read_text(encoding="utf-8") == generate_metrics.page()


def test_every_family_has_its_row() -> None:
    rows = [line.split("|")[1].strip(" `") for line in generate_metrics.page().splitlines() if line.startswith("| `")]
    assert rows == [family.shown for family in (*API, *WORKER)]
