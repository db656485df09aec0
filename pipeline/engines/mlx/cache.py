"""Cache: KV between canonical FP16 pages and the caches that mlx-lm computes on.

Out: a Tap keeps the keys and values a layer has just produced; together they become pages on the device, and a job's
thread copies whole pages while the next chunk computes. The big buffer, which the model updates in place, is never
read. In: pages go to the device as they come and are put into place there, so that nothing is left to do once the last
one is here. MLX may share evaluated arrays between threads, and nothing else: whoever hands arrays over evaluates them
first; an array made from host memory is evaluated by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.engines.mlx.lm import KVCache
from pipeline.engines.mlx.model import Model
from pipeline.errors import EngineError
from pipeline.page import PAGE_TOKENS, PageArray, page_count

BATCH_PAGES = 16  # put into place at once: two operations a layer, whatever their number
STEP = 256  # mlx-lm grows a cache by this many tokens, copying all of it each time


def capacity(tokens: int) -> int:
    """`tokens` rounded up to the step in which mlx-lm grows a cache."""
    return -(-tokens // STEP) * STEP


class Tap(KVCache):
    """A KVCache that also holds what the last call appended: `fresh`, keys and values `(1, kv_heads, n, head_dim)`."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: tuple[Any, Any] | None = None

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        self.fresh = (keys, values)
        return super().update_and_fetch(keys, values)

    def take(self) -> tuple[Any, Any]:
        """What was appended, once. Raises EngineError when the layer was not run."""
        fresh, self.fresh = self.fresh, None
        if fresh is None:
            raise EngineError("a layer did not write its cache: this model cannot be handed over")
        return fresh


def as_pages(layers: Sequence[tuple[Any, Any]]) -> Any:
    """`(pages, layers, 2, kv_heads, 64, head_dim)` in FP16 of the keys and values `(1, kv_heads, tokens, head_dim)` of
    each layer, zero behind the last token. Not evaluated."""
    rows = mx.concatenate([array.astype(mx.float16) for pair in layers for array in pair])
    planes, heads, tokens, dim = rows.shape
    pages = page_count(tokens)
    if missing := pages * PAGE_TOKENS - tokens:  # a pad of nothing would still copy
        rows = mx.pad(rows, [(0, 0), (0, 0), (0, missing), (0, 0)])
    split = rows.reshape(planes // 2, 2, heads, pages, PAGE_TOKENS, dim)
    return mx.contiguous(split.transpose(3, 0, 1, 2, 4, 5))


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens `[start, start + tokens)`, `start` begins a page; `array`: their `as_pages`, evaluated.

    An overflow of FP16 has become Inf, which the reader of the page refuses by name.
    """

    start: int
    tokens: int
    array: Any

    @property
    def pages(self) -> range:
        first = self.start // PAGE_TOKENS
        return range(first, first + -(-self.tokens // PAGE_TOKENS))

    def copy_page(self, index: int) -> PageArray:
        """Page `index` in a fresh array; rows that this chunk does not have are zero."""
        return np.array(np.asarray(self.array)[index - self.start // PAGE_TOKENS])


def chunk(layers: Sequence[tuple[Any, Any]], start: int) -> Chunk:
    """Of the keys and values `(1, kv_heads, tokens, head_dim)` of each layer, evaluated."""
    array = as_pages(layers)
    mx.eval(array)
    return Chunk(start, layers[0][0].shape[2], array)


class Assembly:
    """Caches with room for `tokens` tokens, filled page by page. All but the constructor is for the engine thread."""

    def __init__(self, model: Model, tokens: int) -> None:
        self._dtype = model.dtype
        self._size = (1, model.shape.kv_heads, capacity(tokens), model.shape.head_dim)
        self._caches = [Tap() for _ in range(model.shape.layers)]
        self._empty = True

    def add(self, first: int, pages: Sequence[Any]) -> None:
        """Put evaluated pages `(layers, 2, kv_heads, 64, head_dim)` into place, from page `first` on; does not wait."""
        self._allocate()
        layers, _, heads, _, dim = pages[0].shape
        begin, end = first * PAGE_TOKENS, (first + len(pages)) * PAGE_TOKENS
        rows = mx.stack(pages, axis=3).reshape(layers, 2, 1, heads, end - begin, dim).astype(self._dtype)
        for cache, (keys, values) in zip(self._caches, rows, strict=True):
            # Nobody else has these arrays, so MLX updates them in place.
            cache.keys[..., begin:end, :], cache.values[..., begin:end, :] = keys, values
        mx.async_eval([(cache.keys, cache.values) for cache in self._caches])

    def take(self, tokens: int) -> list[Tap]:
        """The caches, which hold `tokens` tokens. Once."""
        self._allocate()
        caches, self._caches = self._caches, []
        for cache in caches:
            cache.offset = tokens
        return caches

    def pages(self, count: int) -> Chunk | None:
        """Evaluated copies of the leading `count` pages, which are all in place. None once taken or cleared."""
        if not self._caches or not count:
            return None
        rows = [
            (cache.keys[..., : count * PAGE_TOKENS, :], cache.values[..., : count * PAGE_TOKENS, :])
            for cache in self._caches
        ]
        return chunk(rows, 0)

    def clear(self) -> None:
        """Let the memory go."""
        self._caches = []

    def _allocate(self) -> None:
        if self._empty and self._size[2]:
            for cache in self._caches:
                cache.keys, cache.values = mx.zeros(self._size, self._dtype), mx.zeros(self._size, self._dtype)
        self._empty = False


def start(model: Model, tokens: int, held: Sequence[PageArray]) -> list[Tap]:
    """Caches with room for `tokens` tokens that begin with the full pages `held`. Engine thread."""
    assembly = Assembly(model, tokens)
    for first in range(0, len(held), BATCH_PAGES):
        assembly.add(first, [mx.array(page) for page in held[first : first + BATCH_PAGES]])
    return assembly.take(len(held) * PAGE_TOKENS)


def require_fits(model: Model, caches: Sequence[Any], tokens: int) -> None:
    """Raise EngineError unless `caches` are what `model` would have after `tokens` tokens.

    mlx-lm would decode wrong tokens, silently, from too few caches, another dtype or another length.
    """
    shape = model.shape
    if len(caches) != shape.layers:
        raise EngineError(f"{len(caches)} caches for {shape.layers} layers")
    for cache in caches:
        if cache.offset != tokens:
            raise EngineError(f"a cache holds {cache.offset} tokens instead of {tokens}")
        for array in (cache.keys, cache.values) if tokens else ():
            if array.dtype != model.dtype or (array.shape[1], array.shape[3]) != (shape.kv_heads, shape.head_dim):
                raise EngineError(f"a cache of {array.dtype} {array.shape} does not fit this model")
