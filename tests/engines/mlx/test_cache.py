from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import EngineError, UnsupportedModelError
from pipeline.page import PAGE_TOKENS, PageArray, PageShape, page_count

pytest.importorskip("mlx.core", exc_type=ImportError)

import mlx.core as mx

from pipeline.engines.mlx import cache as kv
from pipeline.engines.mlx import lm
from pipeline.engines.mlx.model import Model, require_plain

SHAPE = PageShape(layers=3, kv_heads=2, head_dim=4)
MODELS = {dtype: Model(SimpleNamespace(), getattr(mx, dtype), SHAPE, queues=False) for dtype in ("float16", "float32")}


def history(tokens: int) -> NDArray[np.float16]:
    """Random KV of `tokens` tokens: `(layers, 2, kv_heads, tokens, head_dim)`."""
    size = (SHAPE.layers, 2, SHAPE.kv_heads, tokens, SHAPE.head_dim)
    return np.random.default_rng(tokens).normal(size=size).astype(np.float16)


def page_of(kept: NDArray[np.float16], index: int) -> PageArray:
    page = SHAPE.empty()
    rows = kept[:, :, :, index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
    page[:, :, :, : rows.shape[3]] = rows
    return page


@pytest.mark.parametrize("dtype", MODELS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("start", [0, 128])
def test_a_chunk_gives_its_pages(dtype: str, tokens: int, start: int) -> None:
    kept = history(tokens)
    layers = [tuple(mx.array(part[None]).astype(MODELS[dtype].dtype) for part in layer) for layer in kept]
    chunk = kv.Chunk(start, tokens, kv.as_pages(layers))
    first = start // PAGE_TOKENS
    assert list(chunk.pages) == list(range(first, first + page_count(tokens)))
    for index in chunk.pages:
        page = chunk.copy_page(index)
        assert page.dtype == np.float16
        assert page.flags.owndata
        np.testing.assert_array_equal(page, page_of(kept, index - first))


def test_a_chunk_of_strided_arrays_gives_the_same_pages() -> None:
    kept = history(70)
    layers = [  # as a model makes them: heads swapped in front of tokens without moving a byte
        tuple(mx.array(part[None].transpose(0, 2, 1, 3).copy()).transpose(0, 2, 1, 3) for part in layer)
        for layer in kept
    ]
    np.testing.assert_array_equal(kv.Chunk(0, 70, kv.as_pages(layers)).copy_page(1), page_of(kept, 1))


def test_pages_are_rounded_as_numpy_rounds() -> None:
    """To nearest, ties to even, and FP16's subnormals are kept."""
    bits = np.random.default_rng(3).integers(0, 2**32, 3 * 2 * 2 * 64 * 4, dtype=np.uint32)
    exact = np.concatenate(
        [bits.view(np.float32)[: bits.size // 2], (bits % 2**18).astype(np.float32)[bits.size // 2 :] / 2**34]
    )
    exact = np.where(np.isfinite(exact), exact, 0).reshape(3, 2, 2, 64, 4)
    layers = [tuple(mx.array(part[None]) for part in layer) for layer in exact]
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float16)
    assert (np.abs(expected[expected != 0]) < 6e-5).sum() > 100
    np.testing.assert_array_equal(kv.Chunk(0, 64, kv.as_pages(layers)).copy_page(0), expected)


def test_an_overflow_becomes_infinite_without_a_warning() -> None:
    layers = [(mx.full((1, 2, 5, 4), 1e6), mx.zeros((1, 2, 5, 4))) for _ in range(3)]
    page = kv.Chunk(0, 5, kv.as_pages(layers)).copy_page(0)
    assert np.isinf(page[:, 0, :, :5]).all()


@pytest.mark.parametrize("dtype", MODELS)
@pytest.mark.parametrize("tokens", [0, 1, 64, 255, 256, 300])
@pytest.mark.parametrize("batch", [1, 2, 16])
def test_an_assembly_gives_back_the_pages_it_was_given(dtype: str, tokens: int, batch: int) -> None:
    model, kept = MODELS[dtype], history(tokens)
    assembly = kv.Assembly(model, tokens + 10)
    for first in range(0, page_count(tokens), batch):
        some = range(first, min(first + batch, page_count(tokens)))
        assembly.add(first, [mx.array(page_of(kept, index)) for index in some])
    caches = assembly.take(tokens)
    kv.require_fits(model, caches, tokens)
    for cache, (keys, values) in zip(caches, kept, strict=True):
        assert isinstance(cache, lm.KVCache)
        assert cache.keys.shape == (1, 2, kv.capacity(tokens + 10), 4)
        np.testing.assert_array_equal(np.array(cache.keys)[0, :, :tokens], keys)
        np.testing.assert_array_equal(np.array(cache.values)[0, :, :tokens], values)


def test_a_tap_holds_what_was_appended_once() -> None:
    tap = kv.Tap()
    with pytest.raises(EngineError, match="did not write its cache"):
        tap.take()
    for offset in (0, 3):
        keys, values = mx.full((1, 2, 3, 4), offset), mx.full((1, 2, 3, 4), -offset)
        all_keys, _ = tap.update_and_fetch(keys, values)
        assert all_keys.shape == (1, 2, offset + 3, 4)
        assert tap.take() == (keys, values)
    with pytest.raises(EngineError):
        tap.take()


def test_caches_that_do_not_fit_are_refused() -> None:
    model = MODELS["float32"]
    caches = kv.Assembly(model, 64).take(64)
    kv.require_fits(model, caches, 64)
    with pytest.raises(EngineError, match="2 caches for 3 layers"):
        kv.require_fits(model, caches[:2], 64)
    with pytest.raises(EngineError, match="64 tokens instead of 63"):
        kv.require_fits(model, caches, 63)
    with pytest.raises(EngineError, match="float16"):
        kv.require_fits(model, kv.Assembly(MODELS["float16"], 64).take(64), 64)
    other = Model(SimpleNamespace(), mx.float32, PageShape(3, 2, 8), queues=False)
    with pytest.raises(EngineError, match="does not fit"):
        kv.require_fits(model, kv.Assembly(other, 64).take(64), 64)


def test_only_plain_caches_one_per_layer_can_be_handed_over() -> None:
    from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

    require_plain([lm.KVCache(), lm.KVCache()], 2)
    with pytest.raises(UnsupportedModelError, match="mlx-lm made 1 caches"):
        require_plain([lm.KVCache()], 2)
    for other in (RotatingKVCache(max_size=64), QuantizedKVCache(), kv.Tap()):
        with pytest.raises(UnsupportedModelError, match=type(other).__name__):
            require_plain([lm.KVCache(), other], 2)
