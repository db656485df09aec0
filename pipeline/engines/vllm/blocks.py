"""Blocks: canonical pages read from and written into vLLM's own KV tensors.

One vLLM block is one page (block size 64). Every layer becomes two strided views `(blocks, kv_heads, 64, head_dim)`,
K and V, whatever the memory behind them; from there on all devices share one code path:

- CPU attention: a (block, head) holds K transposed `[head_dim, 64]`, then V `[64, head_dim]`;
- CUDA attention (FlashAttention, FlashInfer, Triton): `[..., 2 * head_dim]`, K first; NHD or HND are only strides.

`verify_layout` proves the CPU form against vLLM's own cache-writing kernel before any page may move.
This module knows nothing of requests or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pipeline.errors import ConfigError
from pipeline.page import PAGE_TOKENS, PageArray, PageShape


class KvViews(NamedTuple):
    """One layer as `(blocks, kv_heads, 64, head_dim)` views of keys and of values."""

    keys: torch.Tensor
    values: torch.Tensor


def split_cpu(layer: torch.Tensor) -> KvViews:
    """Views over `(blocks, kv_heads, 64, 2 * head_dim)` as the CPU attention kernels fill it."""
    blocks, heads, tokens, width = layer.shape
    dim = width // 2
    halves = layer.view(blocks, heads, 2, tokens * dim)
    keys = halves[:, :, 0].view(blocks, heads, dim, tokens).transpose(2, 3)
    return KvViews(keys, halves[:, :, 1].view(blocks, heads, tokens, dim))


def split_cuda(layer: torch.Tensor) -> KvViews:
    """Views over `(blocks, kv_heads, 64, 2 * head_dim)` as the CUDA attention kernels fill it."""
    dim = layer.shape[-1] // 2
    return KvViews(layer[..., :dim], layer[..., dim:])


class BlockPages:
    """Reads and writes pages by block id. `layers`: one KV tensor per layer, in layer order.

    Callers make sure that nobody else writes the block meanwhile. Raises ConfigError when the tensors are not
    FP16 `(blocks, kv_heads, 64, 2 * head_dim)`.
    """

    def __init__(self, layers: Sequence[torch.Tensor], shape: PageShape) -> None:
        expected = (shape.kv_heads, PAGE_TOKENS, 2 * shape.head_dim)
        for layer in layers:
            if tuple(layer.shape[1:]) != expected or layer.dtype != torch.float16:
                raise ConfigError(
                    f"vLLM's KV blocks are {tuple(layer.shape[1:])} {layer.dtype}, expected {expected} torch.float16: "
                    f"this version or attention backend of vLLM is not supported"
                )
        if len(layers) != shape.layers:
            raise ConfigError(f"vLLM holds KV of {len(layers)} layers, the checkpoint has {shape.layers}")
        split = split_cpu if layers[0].device.type == "cpu" else split_cuda
        self._shape = shape
        self._layers = [split(layer) for layer in layers]

    def read(self, block: int, tokens: int) -> PageArray:
        """A fresh page array of the first `tokens` rows of `block`, the rest zero."""
        page = self._shape.empty()
        rows = torch.from_numpy(page)[:, :, :, :tokens]
        with torch.inference_mode():
            for layer, (keys, values) in enumerate(self._layers):
                rows[layer, 0].copy_(keys[block, :, :tokens])
                rows[layer, 1].copy_(values[block, :, :tokens])
        return page

    def write(self, block: int, data: PageArray) -> None:
        """Fill all 64 rows of `block`: attention multiplies the rows behind a tail by zero, and NaN * 0 is NaN."""
        # A page over received bytes is a read-only array, which torch cannot wrap without a warning.
        page = torch.from_numpy(data if data.flags.writeable else np.array(data))
        with torch.inference_mode():
            for layer, (keys, values) in enumerate(self._layers):
                keys[block].copy_(page[layer, 0])
                values[block].copy_(page[layer, 1])


def verify_layout(shape: PageShape) -> None:
    """Write random K and V through vLLM's CPU kernel and read them back as a page, then the other way round.

    Raises ConfigError when this build of vLLM arranges blocks differently from `split_cpu`.
    """
    filled, page = _fill_by_kernel(shape)
    one_layer = PageShape(1, shape.kv_heads, shape.head_dim)
    written = torch.zeros_like(filled)
    BlockPages([written], one_layer).write(1, page)
    read = BlockPages([filled], one_layer).read(1, PAGE_TOKENS)
    if not np.array_equal(read, page) or not torch.equal(written, filled):
        raise ConfigError(
            f"this build of vLLM lays out KV blocks of {shape.kv_heads} heads by {shape.head_dim} differently from "
            f"what Crossfill reads: pages would be wrong, use a supported version of vLLM"
        )


def _fill_by_kernel(shape: PageShape) -> tuple[torch.Tensor, PageArray]:
    """Block 1 of a two-block layer as vLLM's own kernel fills it, and the page that went in."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    page = np.random.default_rng(0).standard_normal((1, *shape.array[1:])).astype(np.float16)
    layer = torch.zeros((2, shape.kv_heads, PAGE_TOKENS, 2 * shape.head_dim), dtype=torch.float16)
    halves = layer.view(2, shape.kv_heads, 2 * PAGE_TOKENS, shape.head_dim).chunk(2, dim=2)
    keys, values = (torch.from_numpy(page[0, i]).transpose(0, 1).contiguous() for i in (0, 1))
    slots = torch.arange(PAGE_TOKENS, 2 * PAGE_TOKENS)
    isa = _get_attn_isa(torch.float16, PAGE_TOKENS, shape.head_dim, "auto")
    ops.cpu_attn_reshape_and_cache(keys, values, halves[0], halves[1], slots, isa)
    return layer, page
