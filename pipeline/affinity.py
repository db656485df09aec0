"""Affinity: which decode replica probably holds a prompt's prefix. A hint, never a promise. Pure.

Every prompt that went to a replica leaves the content addresses of its pages (see `prefix`); the next turn of the
same conversation begins with the same pages. Bounded: what was not asked for longest is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from pipeline.page import PAGE_TOKENS

CAPACITY = 1 << 16  # pages: about 4 million tokens, 10 MB


class Affinity:
    """One API process's memory. Not for two threads at once."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def note(self, replica: str, keys: Sequence[bytes]) -> None:
        """`replica` has these pages now: whole ones only, in the prompt's order."""
        for key in reversed(keys):  # the first page is asked for most: it is forgotten last
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def held_tokens(self, replica: str, keys: Sequence[bytes]) -> int:
        """Leading tokens that `replica` probably holds."""
        pages = next((i for i, key in enumerate(keys) if replica not in self._holders.get(key, ())), len(keys))
        return pages * PAGE_TOKENS

    def forget(self, alive: Collection[str]) -> None:
        """Only `alive` replicas hold anything: another process under an old name starts empty."""
        for key, holders in list(self._holders.items()):
            holders.intersection_update(alive)
            if not holders:
                del self._holders[key]
