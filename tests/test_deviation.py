"""How far two KV lie apart, against plain numpy over the whole, and where the first difference is found."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.deviation import Deviation, Measure
from pipeline.page import Page, PageShape, page_count, page_tokens

SHAPE = PageShape(3, 2, 4)
TOKENS = 150


def kv(seed: int = 0) -> NDArray[np.float16]:
    """`(layers, 2, kv_heads, tokens, head_dim)`."""
    noise = np.random.default_rng(seed)
    return noise.standard_normal((3, 2, 2, TOKENS, 4)).astype(np.float16)


def pages(data: NDArray[np.float16], tokens: int = TOKENS) -> list[Page]:
    found = []
    for index in range(page_count(tokens)):
        page, count = SHAPE.empty(), page_tokens(index, tokens)
        page[:, :, :, :count] = data[:, :, :, index * 64 : index * 64 + count]
        found.append(Page(index, count, page))
    return found


def deviation(ours: list[Page], theirs: list[Page], tolerance: float = 0.05) -> Deviation:
    found = Deviation(3, tolerance)
    for a, b in zip(ours, theirs, strict=False):
        found.add(a, b)
    return found


def measure(a: NDArray[np.float16], b: NDArray[np.float16]) -> Measure:
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    rms = np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))
    return Measure(float(np.abs(x - y).max()), float(rms), float(x @ y / np.linalg.norm(x) / np.linalg.norm(y)))


def test_equal_is_nothing() -> None:
    found = deviation(pages(kv()), pages(kv()))
    assert found.total() == pytest.approx(Measure(0.0, 0.0, 1.0))
    assert (found.first, found.tokens, found.pages) == (None, TOKENS, 3)


def test_measures_are_those_of_the_whole() -> None:
    ours, theirs = kv(1), kv(2)
    found = deviation(pages(ours), pages(theirs))
    assert found.total() == pytest.approx(measure(ours, theirs))
    for layer in range(3):
        assert found.layer(layer) == pytest.approx(measure(ours[layer], theirs[layer]))
    for page in range(3):
        span = slice(page * 64, page * 64 + 64)
        assert found.page(page) == pytest.approx(measure(ours[..., span, :], theirs[..., span, :]))
        assert found.map()[1, page] == pytest.approx(
            measure(ours[1, ..., span, :], theirs[1, ..., span, :]).relative_rms
        )
    assert found.span(2) == range(128, 150)


def test_the_first_divergence_is_the_first_token_then_the_first_layer() -> None:
    theirs = kv()
    ours = theirs.copy()
    ours[2, 0, :, 70] += 1  # earlier token, later layer
    ours[1, 1, :, 70] += 1
    ours[0, 0, :, 71] += 1
    found = deviation(pages(ours), pages(theirs))
    assert found.first is not None
    assert found.first[:3] == (70, 1, "V")
    expected = np.sqrt(8 / (theirs[1, 1, :, 64:128].astype(np.float64) ** 2).sum() * 64)
    assert found.first.relative_rms == pytest.approx(expected, rel=2e-3)


def test_rounding_is_no_divergence_and_the_tolerance_decides() -> None:
    theirs = kv()
    ours = (theirs.astype(np.float32) * 1.003).astype(np.float16)
    assert deviation(pages(ours), pages(theirs)).first is None
    assert deviation(pages(ours), pages(theirs), 0.001).first is not None


def test_rows_that_only_one_has_do_not_count() -> None:
    """One engine needs the last token's KV, the other does not."""
    found = deviation(pages(kv()), pages(kv(), TOKENS - 1))
    assert (found.tokens, found.first, found.total().max_abs) == (TOKENS - 1, None, 0.0)


def test_nothing_and_zeros() -> None:
    assert Deviation(3).total() == Measure(0.0, 0.0, 1.0)
    zeros = np.zeros_like(kv())
    assert deviation(pages(zeros), pages(zeros)).total() == Measure(0.0, 0.0, 1.0)
    lost = deviation(pages(kv()), pages(zeros))
    assert lost.total().relative_rms == np.inf
    assert lost.first is not None
