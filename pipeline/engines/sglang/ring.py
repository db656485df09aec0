"""Ring: a few pages of memory that worker and plug-in share, without a name that could leak or be found.

A memfd, passed by SCM_RIGHTS. Who may touch a slot is agreed by messages, not here.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from pipeline.page import PageArray, PageShape

SLOTS = 8


class Ring:
    """`SLOTS` pages of `shape` over the memory behind `fd`, which is closed here; the mapping stays."""

    def __init__(self, fd: int, shape: PageShape) -> None:
        try:
            self._memory = mmap.mmap(fd, SLOTS * shape.page_bytes)
        finally:
            os.close(fd)
        pages = np.frombuffer(self._memory, np.float16).reshape(SLOTS, *shape.array)
        self.slots: tuple[PageArray, ...] = tuple(pages)


def create(shape: PageShape) -> tuple[Ring, int]:
    """A new ring, and a descriptor of its memory for the other process."""
    fd = os.memfd_create("crossfill-pages", os.MFD_CLOEXEC)
    os.ftruncate(fd, SLOTS * shape.page_bytes)
    return Ring(os.dup(fd), shape), fd
