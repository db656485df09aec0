"""Pool: canonical pages read from and written into SGLang's KV pool, many at a time.

Its pool keeps one tensor of keys and one of values per layer, token-major: `[tokens, kv_heads, head_dim]`, page p in
rows 64p to 64p + 63. On a GPU pages are gathered there by one kernel per tensor, however many there are, and cross in
one transfer on a stream of our own, in order with SGLang's by events: nothing ever waits for the whole device. In host
memory they are copied straight between pool and ring.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.engines.sglang.ring import run_pages
from pipeline.page import PAGE_TOKENS, PageShape

_log = logging.getLogger(__name__)
Pages = NDArray[np.float16]  # `(n, layers, 2, kv_heads, 64, head_dim)`


class Buffer:
    """SGLang's description of its buffers: base addresses and, per buffer, bytes in all and bytes per page."""

    def __init__(self, address: int, size_bytes: int, item_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.item_bytes = item_bytes


class Pool:
    """`buffers` are keys of all layers, then values of all layers. `device`: None for host memory, else a GPU's number.

    One thread reads and writes, at most a run of pages at a time. Raises ValueError when the buffers are not FP16 pages
    of `shape`.
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
        self._device = device
        if device is not None:
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)
            stage = (run_pages(shape), *shape.array)
            self._stage = torch.empty(stage, dtype=torch.float16, device=f"cuda:{device}")

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Let the GPU reach the ring itself: transfers from and to other memory go through a buffer of the driver."""
        if self._device is None:
            return
        status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(status):
            _log.warning("the page ring cannot be pinned (CUDA error %d): copies will be slower", int(status))
            with suppress(RuntimeError):  # the next launch would report this error as its own
                torch.zeros(1, device=self._stage.device)

    def fence(self) -> Any:
        """Everything that the calling thread, the scheduler's, has queued so far; for `read` and `write`."""
        return None if self._device is None else torch.cuda.current_stream(self._device).record_event()

    def read(self, blocks: Sequence[int], pages: Pages, after: Any = None) -> None:
        """Copy `blocks` into `pages`, once work up to `after` is over; returns when they are there."""
        host = torch.from_numpy(pages)
        if self._device is None:
            self._each(blocks, host, lambda block, page: page.copy_(block))
            return

        def move(ids: torch.Tensor, stage: torch.Tensor) -> None:
            for layer, planes in enumerate(self._layers):
                for plane, source in enumerate(planes):
                    torch.index_select(source, 0, ids, out=stage[:, layer, plane])
            host.copy_(stage, non_blocking=True)

        self._on_stream(blocks, after, move)

    def write(self, blocks: Sequence[int], pages: Pages, after: Any = None) -> None:
        """Copy `pages` into `blocks`, once work up to `after` is over; returns when they are there."""
        host = torch.from_numpy(pages)
        if self._device is None:
            self._each(blocks, host, lambda block, page: block.copy_(page))
            return

        def move(ids: torch.Tensor, stage: torch.Tensor) -> None:
            stage.copy_(host, non_blocking=True)
            for layer, planes in enumerate(self._layers):
                for plane, target in enumerate(planes):
                    target.index_copy_(0, ids, stage[:, layer, plane])

        self._on_stream(blocks, after, move)

    def _each(self, blocks: Sequence[int], pages: torch.Tensor, copy: Callable[[Any, Any], Any]) -> None:
        """Strided copies: on a CPU they cost a third of what indexing by a list of blocks does."""
        with torch.inference_mode():
            for block, page in zip(blocks, pages, strict=True):
                for layer, planes in enumerate(self._layers):
                    for plane, memory in enumerate(planes):
                        copy(memory[block], page[layer, plane])

    def _on_stream(self, blocks: Sequence[int], after: Any, move: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        # Pinned: a copy from ordinary memory would wait for the whole stream.
        ids = torch.tensor(list(blocks), dtype=torch.int64, pin_memory=True)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            move(ids.to(self._stage.device, non_blocking=True), self._stage[: len(blocks)])
            done = torch.cuda.Event(blocking=True)  # the waiting thread sleeps: the scheduler needs the interpreter
            done.record()
        done.synchronize()


class _OnGpu:
    """Memory of a GPU as what PyTorch can wrap: the CUDA Array Interface, version 3."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f2", "data": (address, False), "version": 3}


def _view(buffer: Buffer, shape: PageShape, device: int | None) -> torch.Tensor:
    """`(pages, kv_heads, 64, head_dim)` over SGLang's own memory, which is token-major."""
    dims = (buffer.size_bytes // buffer.item_bytes, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    if device is not None:
        return torch.as_tensor(_OnGpu(buffer.address, dims), device=f"cuda:{device}").transpose(1, 2)
    size = dims[0] * buffer.item_bytes
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(buffer.address))
    return torch.from_numpy(memory.view(np.float16).reshape(dims)).transpose(1, 2)
