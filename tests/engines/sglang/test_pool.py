"""Pool: canonical pages in SGLang's own layout, against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.page import PageShape

pytest.importorskip("torch", reason="PyTorch is not in this environment")

from pipeline.engines.sglang.plugin.pool import Buffer, Pool

SHAPE = PageShape(layers=3, kv_heads=2, head_dim=16)
BLOCKS = 5


def arrays() -> list[Any]:
    """Keys of all layers, then values: `(tokens, kv_heads, head_dim)` each, as SGLang allocates them."""
    rng = np.random.default_rng(7)
    shape = (BLOCKS * 64, SHAPE.kv_heads, SHAPE.head_dim)
    return [rng.standard_normal(shape).astype(np.float16) for _ in range(2 * SHAPE.layers)]


def described(memory: list[Any]) -> list[Buffer]:
    return [Buffer(one.ctypes.data, one.nbytes, one.nbytes // BLOCKS) for one in memory]


def canonical(memory: list[Any], block: int) -> Any:
    rows = [one[block * 64 : (block + 1) * 64].transpose(1, 0, 2) for one in memory]
    return np.stack([np.stack(rows[: SHAPE.layers]), np.stack(rows[SHAPE.layers :])], axis=1)


def test_blocks_are_read_in_the_order_asked_for() -> None:
    memory = arrays()
    pages = np.full((3, *SHAPE.array), np.nan, np.float16)
    pool = Pool(described(memory), SHAPE, None)
    pool.read([3, 0, 4], pages, pool.fence())
    assert all(np.array_equal(page, canonical(memory, block)) for page, block in zip(pages, (3, 0, 4), strict=True))


def test_blocks_are_written_and_no_others() -> None:
    memory = arrays()
    before = [one.copy() for one in memory]
    pages = np.random.default_rng(8).standard_normal((2, *SHAPE.array)).astype(np.float16)
    Pool(described(memory), SHAPE, None).write([2, 4], pages)
    assert np.array_equal(canonical(memory, 2), pages[0])
    assert np.array_equal(canonical(memory, 4), pages[1])
    for block in (0, 1, 3):
        assert np.array_equal(canonical(memory, block), canonical(before, block))


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim"), [(2, 2, 16), (3, 1, 16), (3, 2, 32)], ids=["layers", "heads", "dim"]
)
def test_another_models_pool_is_refused(layers: int, kv_heads: int, head_dim: int) -> None:
    memory = arrays()
    with pytest.raises(ValueError, match="SGLang's KV pool has 6 buffers"):
        Pool(described(memory), PageShape(layers, kv_heads, head_dim), None)
