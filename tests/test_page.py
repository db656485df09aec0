"""Page: counts against a plain loop, bytes against numpy, and what may not leave a producer."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import page
from pipeline.errors import EngineError
from pipeline.page import Page, PageShape

SHAPE = PageShape(layers=3, kv_heads=2, head_dim=32)


@settings(deadline=None)
@given(st.integers(0, 5000))
def test_counts_equal_a_plain_loop(tokens: int) -> None:
    sizes, left = [], tokens
    while left:
        sizes.append(min(64, left))
        left -= sizes[-1]
    assert page.page_count(tokens) == len(sizes)
    assert [page.page_tokens(index, tokens) for index in range(len(sizes))] == sizes


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.sampled_from([32, 64, 128]))
def test_bytes_are_those_of_the_array(layers: int, kv_heads: int, head_dim: int) -> None:
    shape = PageShape(layers, kv_heads, head_dim)
    empty = shape.empty()
    assert shape.array == empty.shape == (layers, 2, kv_heads, 64, head_dim)
    assert shape.page_bytes == empty.nbytes
    assert not empty.any()
    assert empty.dtype == np.dtype("<f2")


def test_a_page_of_smollm2_is_1_47_mb() -> None:
    assert PageShape(layers=30, kv_heads=3, head_dim=64).page_bytes == 1_474_560


def test_the_layout_is_head_major_little_endian() -> None:
    """One element by its offset, in bytes, from the layout in the module's docstring."""
    payload = bytearray(SHAPE.page_bytes)
    layer, is_value, head, row, column = 2, 1, 1, 63, 5
    offset = ((((layer * 2 + is_value) * 2 + head) * 64 + row) * 32 + column) * 2
    payload[offset : offset + 2] = struct.pack("<e", 1.5)
    found = page.view(payload, SHAPE)
    assert found[layer, is_value, head, row, column] == 1.5
    assert np.count_nonzero(found) == 1


def test_a_view_shares_memory_and_follows_the_payload_s_rights() -> None:
    payload = bytearray(SHAPE.page_bytes)
    page.view(payload, SHAPE)[0, 0, 0, 0, 0] = 1.0
    assert payload[:2] == struct.pack("<e", 1.0)
    assert not page.view(bytes(payload), SHAPE).flags.writeable


@pytest.mark.parametrize("size", [0, SHAPE.page_bytes - 2, SHAPE.page_bytes - 1, SHAPE.page_bytes + 2])
def test_a_payload_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError):
        page.view(bytes(size), SHAPE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_may_not_leave(value: float) -> None:
    data = SHAPE.empty()
    data[...] = 65504.0
    page.require_finite(Page(7, 64, data))
    data[1, 0, 1, 40, 3] = value
    with pytest.raises(EngineError, match="page 7 holds NaN or Inf"):
        page.require_finite(Page(7, 64, data))


def test_finite_is_what_numpy_calls_finite() -> None:
    """All 65,536 bit patterns, each alone among zeros."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    ours = [page.is_finite(np.array([0, bits, 0], np.uint16).view(np.float16)) for bits in patterns]
    assert ours == list(np.isfinite(patterns.view(np.float16)))
