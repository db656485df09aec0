"""Cache: KV between canonical FP16 pages and the caches that mlx-lm computes on.

Out: a Tap keeps the keys and values a layer has just produced, so that a job's thread copies pages from them while
the next chunk computes; the big buffer, which the model updates in place, is never read. In: pages are written
into one staging buffer in the compute dtype, which becomes the caches. MLX may share evaluated arrays between
threads, and nothing else: whoever hands arrays over evaluates them first.
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
from pipeline.page import PAGE_TOKENS, PageArray, PageShape, page_tokens

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Evaluated keys and values of the tokens `[start, start + tokens)`, per layer. `start` begins a page."""

    start: int
    tokens: int
    layers: list[tuple[Any, Any]]

    @property
    def pages(self) -> range:
        first = self.start // PAGE_TOKENS
        return range(first, first + -(-self.tokens // PAGE_TOKENS))

    def copy_page(self, shape: PageShape, index: int) -> PageArray:
        """Page `index`, rounded to FP16, in a fresh array; rows that this chunk does not have stay zero."""
        page = shape.empty()
        low = index * PAGE_TOKENS - self.start
        count = page_tokens(index, self.start + self.tokens)
        with np.errstate(over="ignore"):  # an overflow becomes Inf, which the reader of the page refuses by name
            for target, pair in zip(page, self.layers, strict=True):
                for rows, array in zip(target, pair, strict=True):
                    rows[:, :count] = np.asarray(array)[0, :, low : low + count]
        return page


class Staging:
    """Room for `tokens` tokens of KV as `[layer][K,V][kv_head][capacity][head_dim]` in the compute dtype."""

    def __init__(self, model: Model, tokens: int) -> None:
        shape = model.shape
        self._dtype = model.numpy_dtype
        self._layers = [
            np.zeros((2, 1, shape.kv_heads, capacity(tokens), shape.head_dim), self._dtype) for _ in range(shape.layers)
        ]

    def write(self, index: int, tokens: int, data: PageArray) -> None:
        """Copy the `tokens` valid rows of page `index` in."""
        start = index * PAGE_TOKENS
        for layer, source in zip(self._layers, data, strict=True):
            layer[:, 0, :, start : start + tokens] = source[:, :, :tokens]

    def read(self, index: int, tokens: int) -> PageArray:
        """Page `index`, of which `tokens` rows were written, in a fresh array."""
        start = index * PAGE_TOKENS
        layers = np.stack([layer[:, 0, :, start : start + PAGE_TOKENS] for layer in self._layers])
        page = layers.astype(np.float16)  # what was written came as FP16: exact
        page[:, :, :, tokens:] = 0
        return page

    def take(self, tokens: int) -> list[KVCache]:
        """Caches that hold the first `tokens` tokens. Each layer is let go as soon as it was copied.

        Arrays made from numpy are evaluated by construction, so the caches may go to another thread.
        """
        self._layers.reverse()
        caches = []
        while self._layers:
            layer = self._layers.pop()
            cache = KVCache()
            cache.keys, cache.values = mx.array(layer[0]), mx.array(layer[1])
            cache.offset = tokens
            caches.append(cache)
        return caches


def start(model: Model, tokens: int, held: Sequence[PageArray]) -> list[Tap]:
    """Caches with room for `tokens` tokens that begin with the full pages `held`."""
    taps = [Tap() for _ in range(model.shape.layers)]
    if held:
        staging = Staging(model, tokens)
        for index, page in enumerate(held):
            staging.write(index, PAGE_TOKENS, page)
        sources = staging.take(len(held) * PAGE_TOKENS)
        for tap, source in zip(taps, sources, strict=True):
            tap.keys, tap.values, tap.offset = source.keys, source.values, source.offset
    elif tokens:
        size = (1, model.shape.kv_heads, capacity(tokens), model.shape.head_dim)
        for tap in taps:
            tap.keys, tap.values = mx.zeros(size, model.dtype), mx.zeros(size, model.dtype)
    return taps


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
