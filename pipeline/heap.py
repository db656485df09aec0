"""Heap: the objects that live as long as the process."""

from __future__ import annotations

import gc


def settle() -> None:
    """Keep what exists by now, modules and what is loaded, out of later garbage collections: there are 100,000 objects
    and more, and a full collection that looks through them stops every thread and stream for a tenth of a second."""
    gc.collect()
    gc.freeze()
