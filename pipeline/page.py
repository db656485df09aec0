"""Page: 64 tokens of canonical KV, the only shape in which KV leaves an engine.

Layout `[layer][K,V][kv_head][64][head_dim]` (head-major), FP16 little-endian, C-contiguous, the rows
behind `tokens` zero. K is post-RoPE. Head-major because both vLLM and MLX copy it with the fewest strides.
This module knows numpy and nothing of engines, wires or brokers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EngineError

PAGE_TOKENS = 64
PageArray: TypeAlias = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class PageShape:
    """The dimensions of one page of a model: `array` is `(layers, 2, kv_heads, 64, head_dim)`."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def array(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, PAGE_TOKENS, self.head_dim)

    @property
    def page_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * PAGE_TOKENS * self.head_dim * 2

    def empty(self) -> PageArray:
        """A zeroed page: engines fill the valid rows, the padding is then right by construction."""
        return np.zeros(self.array, np.float16)


@dataclass(frozen=True, slots=True)
class Page:
    """Page `index` of a prompt: rows `[0, tokens)` of `data` are valid, 1 <= tokens <= 64."""

    index: int
    tokens: int
    data: PageArray


def page_count(tokens: int) -> int:
    """How many pages hold `tokens` tokens, the partial tail included."""
    return -(-tokens // PAGE_TOKENS)


def page_tokens(index: int, tokens: int) -> int:
    """How many of `tokens` tokens lie in page `index` (1..64)."""
    return min(PAGE_TOKENS, tokens - index * PAGE_TOKENS)


def view(payload: bytes | bytearray | memoryview, shape: PageShape) -> PageArray:
    """The page array over `payload` without a copy. The caller has checked the length.

    Raises ValueError when the length is not `shape.page_bytes`.
    """
    return np.frombuffer(payload, np.float16).reshape(shape.array)


def is_finite(data: PageArray) -> bool:
    """Neither NaN nor Inf. On the bits, as integers: numpy's own float16 test is ten times slower.

    Without the sign these are the patterns from 0x7C00 up: the largest signed ones, and, with it, the largest unsigned.
    Two plain reductions, no temporary array.
    """
    flat = data.reshape(-1)  # of a page's five dimensions numpy walks each
    largest = np.maximum.reduce  # `max` is a detour through Python to it
    return bool(largest(flat.view(np.int16)) < 0x7C00 and largest(flat.view(np.uint16)) < 0xFC00)


def require_finite(page: Page) -> None:
    """Raise EngineError when a page holds NaN or Inf: such KV must never leave the producer."""
    if not is_finite(page.data):
        raise EngineError(f"page {page.index} holds NaN or Inf: the checkpoint overflows FP16")
