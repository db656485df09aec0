"""Pool: canonical pages read from and written into SGLang's KV pool.

Its pool keeps one tensor of keys and one of values per layer, token-major: `[tokens, kv_heads, head_dim]`, page p in
rows 64p to 64p + 63. One code path serves both devices: on a GPU a page is gathered there and crosses in one copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.page import PAGE_TOKENS, PageArray, PageShape


class Buffer:
    """SGLang's description of its buffers: base addresses and, per buffer, bytes in all and bytes per page."""

    def __init__(self, address: int, size_bytes: int, item_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.item_bytes = item_bytes


class Pool:
    """`buffers` are keys of all layers, then values of all layers. `device`: None for host memory, else a GPU's number.

    Raises ValueError when they are not FP16 pages of `shape`.
    """

    def __init__(self, buffers: Sequence[Buffer], shape: PageShape, device: int | None) -> None:
        expected = shape.page_bytes // (2 * shape.layers)
        if len(buffers) != 2 * shape.layers or any(buffer.item_bytes != expected for buffer in buffers):
            raise ValueError(
                f"SGLang's KV pool has {len(buffers)} buffers with pages of {buffers[0].item_bytes} bytes, not "
                f"{2 * shape.layers} with {expected}: FP16, one GPU and pages of {PAGE_TOKENS} tokens are needed"
            )
        views = [_view(buffer, shape, device) for buffer in buffers]
        self._layers = list(zip(views[: shape.layers], views[shape.layers :], strict=True))
        self._stage: torch.Tensor | None = None
        self._stream: Any = None
        if device is not None:
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)
            self._stage = torch.empty(shape.array, dtype=torch.float16, device=f"cuda:{device}")

    def read(self, block: int, page: PageArray) -> None:
        """Copy `block` into `page`; returns when it is there."""
        target = torch.from_numpy(page)
        self._run(lambda stage: self._gather(block, stage), target, out=True)

    def write(self, block: int, page: PageArray) -> None:
        """Copy `page` into `block`; returns when it is there."""
        source = torch.from_numpy(page)
        self._run(lambda stage: self._scatter(block, stage), source, out=False)

    def _run(self, move: Any, host: torch.Tensor, *, out: bool) -> None:
        with torch.inference_mode():
            if self._stage is None:
                move(host)
                return
            with torch.cuda.stream(self._stream):
                if out:
                    move(self._stage)
                    host.copy_(self._stage, non_blocking=True)
                else:
                    self._stage.copy_(host, non_blocking=True)
                    move(self._stage)
            self._stream.synchronize()

    def _gather(self, block: int, page: torch.Tensor) -> None:
        for layer, (keys, values) in enumerate(self._layers):
            page[layer, 0].copy_(keys[block].transpose(0, 1))
            page[layer, 1].copy_(values[block].transpose(0, 1))

    def _scatter(self, block: int, page: torch.Tensor) -> None:
        for layer, (keys, values) in enumerate(self._layers):
            keys[block].copy_(page[layer, 0].transpose(0, 1))
            values[block].copy_(page[layer, 1].transpose(0, 1))


class _OnGpu:
    """Memory of a GPU as what PyTorch can wrap: the CUDA Array Interface, version 3."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f2", "data": (address, False), "version": 3}


def _view(buffer: Buffer, shape: PageShape, device: int | None) -> torch.Tensor:
    """`(pages, 64, kv_heads, head_dim)` over SGLang's own memory."""
    dims = (buffer.size_bytes // buffer.item_bytes, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    if device is not None:
        return torch.as_tensor(_OnGpu(buffer.address, dims), device=f"cuda:{device}")
    size = dims[0] * buffer.item_bytes
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(buffer.address))
    return torch.from_numpy(memory.view(np.float16).reshape(dims))
