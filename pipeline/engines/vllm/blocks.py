"""Blocks: canonical pages gathered from and scattered into vLLM's own KV tensors, many at a time.

One vLLM block is one page (block size 64). Every layer becomes strided views `(blocks, planes, kv_heads, 64, head_dim)`
whatever the memory behind them; a plane is K or V. From there on all devices share one code path:

- CPU attention: a (block, head) holds K transposed `[head_dim, 64]`, then V `[64, head_dim]`: two views of one plane;
- CUDA attention (FlashAttention, FlashInfer, Triton): `[..., 2 * head_dim]`, K first: one view of two planes. NHD or
  HND are only strides.

A gather is one kernel per view for any number of pages, on whatever stream is current. `verify_layout` proves the form
against vLLM's own cache-writing kernel before any page may move. This module knows nothing of requests or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pipeline.errors import ConfigError
from pipeline.page import PAGE_TOKENS, PageArray, PageShape


class KvView(NamedTuple):
    """Planes `planes` of one layer (0 is K, 1 is V) as a `(blocks, planes, kv_heads, 64, head_dim)` view."""

    planes: slice
    view: torch.Tensor


def split_cpu(layer: torch.Tensor) -> list[KvView]:
    """Views over `(blocks, kv_heads, 64, 2 * head_dim)` as the CPU attention kernels fill it."""
    blocks, heads, tokens, width = layer.shape
    dim = width // 2
    halves = layer.view(blocks, heads, 2, tokens * dim)
    keys = halves[:, :, 0].view(blocks, heads, dim, tokens).transpose(2, 3)
    values = halves[:, :, 1].view(blocks, heads, tokens, dim)
    return [KvView(slice(0, 1), keys.unsqueeze(1)), KvView(slice(1, 2), values.unsqueeze(1))]


def split_cuda(layer: torch.Tensor) -> list[KvView]:
    """One view over `(blocks, kv_heads, 64, 2 * head_dim)` as the CUDA attention kernels fill it."""
    return [KvView(slice(0, 2), layer.unflatten(-1, (2, layer.shape[-1] // 2)).permute(0, 3, 1, 2, 4))]


class BlockPages:
    """Moves pages by block id. `layers`: one KV tensor per layer, in layer order.

    Callers make sure that nobody else writes the blocks meanwhile. Raises ConfigError when the tensors are not
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
        self.shape = shape
        self.device = layers[0].device
        split = split_cpu if self.device.type == "cpu" else split_cuda
        self._layers = [split(layer) for layer in layers]

    def gather(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """`blocks` (n ids, int64) into `pages` `(n, layers, 2, kv_heads, 64, head_dim)`, both on the KV's device."""
        with torch.inference_mode():
            for layer, views in enumerate(self._layers):
                for planes, view in views:
                    torch.index_select(view, 0, blocks, out=pages[:, layer, planes])

    def scatter(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Fill all 64 rows of each block: attention multiplies the rows behind a tail by zero, and NaN * 0 is NaN."""
        with torch.inference_mode():
            for layer, views in enumerate(self._layers):
                for planes, view in views:
                    view.index_copy_(0, blocks, pages[:, layer, planes])

    def fill(self, value: float) -> None:
        """Overwrite every block: after this nothing of an earlier request can be read."""
        with torch.inference_mode():
            for views in self._layers:
                for _, view in views:
                    view.fill_(value)


def verify_layout(shape: PageShape, device: str) -> None:
    """Write random K and V through vLLM's own kernel and read them back as a page, then the other way round.

    Raises ConfigError when this build of vLLM arranges blocks differently from `split_cpu` or `split_cuda`.
    """
    page = np.random.default_rng(0).standard_normal((1, 1, *shape.array[1:])).astype(np.float16)
    filled = (_fill_by_cpu_kernel if device == "cpu" else _fill_by_cuda_kernel)(shape, page[0, 0])
    one_layer = PageShape(1, shape.kv_heads, shape.head_dim)
    written, read = torch.zeros_like(filled), torch.empty(page.shape, dtype=torch.float16, device=device)
    ids = torch.tensor([1], device=device)
    BlockPages([written], one_layer).scatter(ids, torch.from_numpy(page).to(device))
    BlockPages([filled], one_layer).gather(ids, read)
    if not np.array_equal(read.cpu().numpy(), page) or not torch.equal(written, filled):
        raise ConfigError(
            f"this build of vLLM lays out KV blocks of {shape.kv_heads} heads by {shape.head_dim} differently from "
            f"what Crossfill reads: pages would be wrong, use a supported version of vLLM"
        )


def _fill_by_cpu_kernel(shape: PageShape, page: PageArray) -> torch.Tensor:
    """Block 1 of a two-block layer as vLLM's CPU kernel fills it from `page` `[K,V][kv_head][64][head_dim]`."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    layer = torch.zeros((2, shape.kv_heads, PAGE_TOKENS, 2 * shape.head_dim), dtype=torch.float16)
    halves = layer.view(2, shape.kv_heads, 2 * PAGE_TOKENS, shape.head_dim).chunk(2, dim=2)
    keys, values, slots = _tokens_of(page, "cpu")
    isa = _get_attn_isa(torch.float16, PAGE_TOKENS, shape.head_dim, "auto")
    ops.cpu_attn_reshape_and_cache(keys, values, halves[0], halves[1], slots, isa)
    return layer


def _fill_by_cuda_kernel(shape: PageShape, page: PageArray) -> torch.Tensor:
    """The same through the kernel of vLLM's FlashAttention backend, which stores NHD in memory."""
    from vllm import _custom_ops as ops

    memory = torch.zeros((2, PAGE_TOKENS, shape.kv_heads, 2 * shape.head_dim), dtype=torch.float16, device="cuda")
    keys, values, slots = _tokens_of(page, "cuda")
    one = torch.ones((), device="cuda")
    ops.reshape_and_cache_flash(keys, values, *memory.chunk(2, dim=-1), slots, "auto", one, one)
    return memory.transpose(1, 2)


def _tokens_of(page: PageArray, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V `(64, kv_heads, head_dim)`, and the slots of block 1."""
    keys, values = (torch.from_numpy(plane).transpose(0, 1).contiguous().to(device) for plane in page)
    return keys, values, torch.arange(PAGE_TOKENS, 2 * PAGE_TOKENS, device=device)
