"""Ring: a little memory that worker and plug-in share, without a name that could leak or be found.

A memfd, passed by SCM_RIGHTS. It is divided into runs of neighbouring pages: what moves together between a run and the
KV pool costs one message and, on a GPU, one transfer. Who may touch a run is agreed by messages, not here.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from pipeline.page import PageShape

RUNS = 4  # copies at once, over all handoffs
_RUN_BYTES = 16 << 20
_RUN_PAGES = 16  # 1024 tokens: a usual chunk


def run_pages(shape: PageShape) -> int:
    """Pages of one run: 16, fewer where they are large."""
    return max(1, min(_RUN_PAGES, _RUN_BYTES // shape.page_bytes))


class Ring:
    """`RUNS` runs of pages of `shape` over the memory behind `fd`, which is closed here; the mapping stays.

    `memory` is all of it, as bytes; `runs[i]` is `(run_pages, layers, 2, kv_heads, 64, head_dim)`.
    """

    def __init__(self, fd: int, shape: PageShape) -> None:
        try:
            mapping = mmap.mmap(fd, _size_bytes(shape))
        finally:
            os.close(fd)
        self.memory: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        pages = self.memory.view(np.float16).reshape(RUNS, run_pages(shape), *shape.array)
        self.runs: tuple[NDArray[np.float16], ...] = tuple(pages)


def create(shape: PageShape) -> tuple[Ring, int]:
    """A new ring, and a descriptor of its memory for the other process."""
    fd = os.memfd_create("crossfill-pages", os.MFD_CLOEXEC)
    os.ftruncate(fd, _size_bytes(shape))
    return Ring(os.dup(fd), shape), fd


def _size_bytes(shape: PageShape) -> int:
    return RUNS * run_pages(shape) * shape.page_bytes
