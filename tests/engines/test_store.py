"""PageStore: what it finds, what it evicts, and a model-based test against a store written the obvious way."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.store import PageStore, Pin, StoreStats
from pipeline.page import PageArray, PageShape

SHAPE = PageShape(1, 1, 4)
BYTES = SHAPE.page_bytes  # 1 KiB


def page(fill: int) -> PageArray:
    return np.full(SHAPE.array, fill, np.float16)


def filled(*fills: int, room: int = 8) -> PageStore:
    store = PageStore(room * BYTES)
    for fill in fills:
        assert store.put(key(fill), page(fill))
    return store


def key(fill: int) -> bytes:
    return bytes([fill]) * 32


def found(store: PageStore, *fills: int) -> list[int]:
    return [int(data.flat[0]) for data in store.longest_prefix([key(fill) for fill in fills])]


def test_a_prefix_ends_at_the_first_gap() -> None:
    store = filled(1, 2, 4)
    assert found(store, 1, 2, 3, 4) == [1, 2]
    assert found(store, 3, 4) == []
    assert found(store) == []


def test_pages_are_frozen_and_not_copied() -> None:
    store, data = PageStore(BYTES), page(1)
    store.put(key(1), data)
    assert store.longest_prefix([key(1)])[0] is data
    with pytest.raises(ValueError, match="read-only"):
        data[...] = 2


def test_a_view_is_copied_so_that_its_base_cannot_reach_in() -> None:
    store, base = PageStore(BYTES), np.zeros((2, *SHAPE.array), np.float16)
    store.put(key(1), base[0])
    base[...] = 9
    assert found(store, 1) == [0]


def test_the_first_of_two_equal_keys_stays() -> None:
    store = filled(1)
    assert store.put(key(1), page(2))
    assert found(store, 1) == [1]
    assert store.stats() == StoreStats(1, 0, BYTES)


def test_the_least_recently_used_goes_first() -> None:
    store = filled(1, 2, 3, room=3)
    found(store, 1)
    store.put(key(4), page(4))
    assert [found(store, fill) for fill in (1, 2, 3, 4)] == [[1], [], [3], [4]]


def test_a_chain_loses_its_tail_before_its_head() -> None:
    store = filled(1, 2, 3, room=3)
    found(store, 1, 2, 3)
    store.put(key(9), page(9))
    assert found(store, 1, 2, 3) == [1, 2]


def test_a_pinned_page_is_never_evicted() -> None:
    store = filled(1, 2, room=2)
    pin = store.pin([key(1), key(2), key(3)])
    assert [int(data.flat[0]) for data in pin.pages] == [1, 2]
    assert store.stats() == StoreStats(2, 2, 2 * BYTES)
    assert not store.put(key(3), page(3))
    assert found(store, 1, 2) == [1, 2]
    pin.release()
    assert store.put(key(3), page(3))
    assert found(store, 1, 2) == [1]


def test_pins_count_and_release_is_idempotent() -> None:
    store = filled(1, room=1)
    first, second = store.pin([key(1)]), store.pin([key(1)])
    first.release()
    first.release()
    assert store.stats().pinned == 1
    assert not store.put(key(2), page(2))
    with second:
        pass
    assert store.stats().pinned == 0
    assert store.put(key(2), page(2))


def test_nothing_is_evicted_for_a_page_that_cannot_fit() -> None:
    store = filled(1, 2, room=2)
    pin = store.pin([key(1)])
    big = np.zeros(2 * BYTES // 2, np.float16)
    assert not store.put(key(3), big)
    assert found(store, 2) == [2]
    pin.release()


def test_a_cap_of_zero_stores_nothing() -> None:
    store = PageStore(0)
    assert not store.put(key(1), page(1))
    assert store.stats() == StoreStats(0, 0, 0)


def test_clear_forgets_pages_and_keeps_the_bytes_of_pinned_ones_counted() -> None:
    store = filled(1, 2, room=2)
    pin = store.pin([key(1)])
    store.clear()
    assert found(store, 1, 2) == []
    assert store.stats() == StoreStats(0, 1, BYTES)
    assert int(pin.pages[0].flat[0]) == 1
    assert store.put(key(1), page(7))  # the same content again, a new entry
    pin.release()
    assert store.stats() == StoreStats(1, 0, BYTES)
    assert found(store, 1) == [7]


class Obvious:
    """The same rules over plain lists: `order` from least to most recently used."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.order: list[int] = []
        self.pins: list[list[int]] = []

    def pinned(self) -> set[int]:
        return {fill for pin in self.pins for fill in pin}

    def put(self, fill: int) -> bool:
        if fill in self.order:
            self.order.remove(fill)
        elif len(self.order) == self.room:
            free = [other for other in self.order if other not in self.pinned()]
            if not free:
                return False
            self.order.remove(free[0])
        self.order.append(fill)
        return True

    def leading(self, fills: list[int]) -> list[int]:
        lead: list[int] = []
        for fill in fills:
            if fill not in self.order:
                break
            lead.append(fill)
        for fill in reversed(lead):
            self.order.remove(fill)
            self.order.append(fill)
        return lead


FILLS = st.integers(1, 6)
STEPS = st.one_of(
    st.tuples(st.just("put"), FILLS),
    st.tuples(st.just("find"), st.lists(FILLS, unique=True)),
    st.tuples(st.just("pin"), st.lists(FILLS, unique=True)),
    st.tuples(st.just("release"), st.integers(0, 3)),
)


@given(st.lists(STEPS, max_size=40))
def test_it_behaves_like_the_obvious_store(steps: list[tuple[str, int | list[int]]]) -> None:
    store, model = PageStore(4 * BYTES), Obvious(4)
    pins: list[Pin] = []
    for verb, what in steps:
        if verb == "put" and isinstance(what, int):
            assert store.put(key(what), page(what)) == model.put(what)
        elif verb == "find" and isinstance(what, list):
            assert found(store, *what) == model.leading(what)
        elif verb == "pin" and isinstance(what, list):
            pins.append(store.pin([key(fill) for fill in what]))
            model.pins.append(model.leading(what))
            assert [int(data.flat[0]) for data in pins[-1].pages] == model.pins[-1]
        elif isinstance(what, int) and what < len(pins):
            pins.pop(what).release()
            model.pins.pop(what)
        assert store.stats() == StoreStats(len(model.order), len(model.pinned()), len(model.order) * BYTES)


def test_threads_leave_it_consistent() -> None:
    store = PageStore(4 * BYTES)

    def work(start: int) -> None:
        for turn in range(200):
            fill = (start + turn) % 8
            store.put(key(fill), page(fill))
            with store.pin([key(fill)]) as pin:
                assert all(int(data.flat[0]) == fill for data in pin.pages)

    threads = [Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = store.stats()
    assert stats.pinned == 0
    assert stats.bytes == stats.pages * BYTES <= 4 * BYTES
