"""Copier: pages between vLLM's blocks and host memory, in batches, beside the engine's own stream of work.

On CUDA the engine's forward may still run when its step says that it is queued. So whoever announces blocks records a
`Fence`, and a copy begins only after it; it then runs on a stream of its own, one per direction, into or out of pinned
host memory. A call returns when its own copy is over and waits for nothing else: there is no device-wide synchronise.

Allocating pinned or device memory is one, implicitly. So both come from torch's caching allocators in one size, that of
a full batch, and the caches are filled at start: a piece goes back with the last array that uses it.

On a CPU every fence has passed and a copy is done when it was issued; the rest is the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.engines.vllm.blocks import BlockPages

# A batch costs two dozen kernel launches however many pages it has, about 0.3 ms of one CPU. 16 pages are 1024 tokens.
_CUDA_BATCH = 16
# Batches of pinned memory that exist from the start. More in use at once cost one implicit synchronise each, once.
_PINNED_BATCHES = 8


class Fence:
    """A point in the engine's queue of device work."""

    def __init__(self, event: Any = None) -> None:
        self._event = event

    @property
    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Copier:
    """`batch`: how many pages are worth moving in one call; more are allowed. Any thread may call any method."""

    def __init__(self, pages: BlockPages) -> None:
        self.pages = pages
        self._cuda = pages.device.type == "cuda"
        self.batch = _CUDA_BATCH if self._cuda else 1
        self._outward, self._inward = (torch.cuda.Stream(pages.device) if self._cuda else None for _ in range(2))
        if self._cuda:
            self._fill_caches()

    def _fill_caches(self) -> None:
        """Move block 0, which vLLM never gives to a request, out and in, and hold several batches meanwhile."""
        held = [self.host(self.batch) for _ in range(_PINNED_BATCHES)]
        for stream in (self._outward, self._inward):
            with torch.cuda.stream(stream):
                held += [self._on_device(self.batch) for _ in range(2)]  # two threads at once on one stream
        held[0].numpy()[:1] = self.read([0], Fence())
        self.write([0], held[0][:1], Fence())

    def fence(self) -> Fence:
        """Everything that the calling thread, the engine's, has queued on its current stream so far."""
        return Fence(self._record() if self._cuda else None)

    def host(self, pages: int) -> torch.Tensor:
        """Uninitialised host memory for that many pages, pinned for CUDA."""
        shape = (max(pages, self.batch), *self.pages.shape.array)
        return torch.empty(shape, dtype=torch.float16, pin_memory=self._cuda)[:pages]

    def _on_device(self, pages: int) -> torch.Tensor:
        shape = (max(pages, self.batch), *self.pages.shape.array)
        return torch.empty(shape, dtype=torch.float16, device=self.pages.device)[:pages]

    def read(self, blocks: Sequence[int], after: Fence) -> NDArray[np.float16]:
        """Fresh `(n, layers, 2, kv_heads, 64, head_dim)`: the pages in `blocks`, complete once `after` has passed."""
        host = self.host(len(blocks))
        with self._copying(self._outward, after):
            pages = self._on_device(len(blocks)) if self._cuda else host
            self.pages.gather(self._ids(blocks), pages)
            if pages is not host:
                host.copy_(pages, non_blocking=True)
        array: NDArray[np.float16] = host.numpy()
        return array

    def write(self, blocks: Sequence[int], host: torch.Tensor, after: Fence) -> None:
        """Page i of `host` (of `host()`) into `blocks[i]`, once earlier work on the blocks is over (`after`)."""
        with self._copying(self._inward, after):
            pages = self._on_device(len(blocks)) if self._cuda else host
            if pages is not host:
                pages.copy_(host, non_blocking=True)
            self.pages.scatter(self._ids(blocks), pages)

    @contextmanager
    def _copying(self, stream: Any, after: Fence) -> Iterator[None]:
        # Waited for here and not on the stream: a copy of blocks that are complete must not queue behind this one.
        after.wait()
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            yield
            done = self._record()
        done.synchronize()

    def _record(self) -> Any:
        event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps: cores are for the engine
        event.record()
        return event

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        """Block ids on the KV's device. Pinned: a copy from ordinary memory would wait for the whole stream."""
        ids = torch.tensor(list(blocks), dtype=torch.int64, pin_memory=self._cuda)
        return ids.to(self.pages.device, non_blocking=True)
