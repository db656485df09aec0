"""PageStore: full pages an engine keeps for prefix hits, least recently used out first, under a byte cap.

Pages are content-addressed by their prefix chain key, so equal keys mean equal tokens, model and tenant, and a
stored page is never changed. A pinned page is never evicted. Thread safe; knows neither engines nor requests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.page import PageArray


class StoreStats(NamedTuple):
    """Gauges. `pinned` and `bytes` count forgotten pages too while somebody has them pinned."""

    pages: int
    pinned: int
    bytes: int


class _Entry:
    __slots__ = ("data", "pins", "stored")

    def __init__(self, data: PageArray) -> None:
        self.data = data
        self.pins = 0
        self.stored = True


class Pin:
    """A hold on the leading stored pages of one prompt. `release` is idempotent; a `with` block releases too."""

    def __init__(self, store: PageStore, entries: list[_Entry]) -> None:
        self._store = store
        self._entries = entries
        self.pages: tuple[PageArray, ...] = tuple(entry.data for entry in entries)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self.pages = ()
        self._store._unpin(self)


class PageStore:
    """Pages by chain key. `cap_bytes` bounds what is stored; 0 stores nothing."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._pinned = 0

    def put(self, key: bytes, data: PageArray) -> bool:
        """Keep a full page and make it read-only; True when it is stored afterwards.

        An array that owns its memory is taken over and frozen, a view is copied first (its base could still be
        written through). False: the cap leaves no room beside what is pinned.
        """
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return True
            if not self._make_room(data.nbytes):
                return False
            self._entries[key] = _Entry(_frozen(data))
            self._bytes += data.nbytes
            return True

    def longest_prefix(self, keys: Sequence[bytes]) -> list[PageArray]:
        """The stored pages of the leading `keys`, without a gap. Valid for as long as the caller keeps them."""
        with self._lock:
            return [entry.data for entry in self._leading(keys)]

    def pin(self, keys: Sequence[bytes]) -> Pin:
        """`longest_prefix`, and its pages stay stored until the Pin is released."""
        with self._lock:
            entries = self._leading(keys)
            for entry in entries:
                self._pinned += entry.pins == 0
                entry.pins += 1
            return Pin(self, entries)

    def clear(self) -> None:
        """Forget every page. Pinned ones are no longer found, and their bytes go with their last pin."""
        with self._lock:
            for entry in self._entries.values():
                entry.stored = False
                self._bytes -= 0 if entry.pins else entry.data.nbytes
            self._entries.clear()

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(len(self._entries), self._pinned, self._bytes)

    def _leading(self, keys: Sequence[bytes]) -> list[_Entry]:
        found: list[_Entry] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            found.append(entry)
        for key in reversed(keys[: len(found)]):  # the head last: a chain must lose its tail before its head
            self._entries.move_to_end(key)
        return found

    def _make_room(self, need: int) -> bool:
        """Evict until `need` bytes fit, or evict nothing when they cannot."""
        victims: list[bytes] = []
        free = self.cap_bytes - self._bytes
        for key, entry in self._entries.items():
            if free >= need:
                break
            if entry.pins == 0:
                victims.append(key)
                free += entry.data.nbytes
        if free < need:
            return False
        for key in victims:
            self._bytes -= self._entries.pop(key).data.nbytes
        return True

    def _unpin(self, pin: Pin) -> None:
        with self._lock:
            entries, pin._entries = pin._entries, []
            for entry in entries:
                entry.pins -= 1
                self._pinned -= entry.pins == 0
                if entry.pins == 0 and not entry.stored:
                    self._bytes -= entry.data.nbytes


def _frozen(data: PageArray) -> PageArray:
    if data.base is not None or not data.flags.c_contiguous:
        data = np.array(data, order="C")
    data.flags.writeable = False
    return data
