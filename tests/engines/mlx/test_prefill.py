from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.engines.store import PageStore
from pipeline.errors import EngineError, HandoffCancelledError
from pipeline.page import PAGE_TOKENS, PageArray, PageShape

pytest.importorskip("mlx.core", exc_type=ImportError)

import mlx.core as mx

from pipeline.engines.mlx.cache import Chunk, as_pages
from pipeline.engines.mlx.prefill import MlxPrefill
from tests.engines.flow import Waiter

SHAPE = PageShape(layers=1, kv_heads=1, head_dim=2)
KEYS = [bytes([index]) for index in range(8)]


class Made:
    """A prefill of `tokens` tokens, what it called, and the chunks that feed it: KV of token t is t."""

    def __init__(self, tokens: int, *, held: int = 0, cap_pages: int = 8) -> None:
        self.store = PageStore(cap_pages * SHAPE.page_bytes)
        for index in range(held):
            self.store.put(KEYS[index], np.full(SHAPE.array, index, np.float16))
        self.closed: list[MlxPrefill] = []
        self.pages = MlxPrefill(
            tokens,
            KEYS,
            self.store.pin(KEYS[:held]),
            self.store,
            on_free=lambda: None,
            on_close=self.closed.append,
        )

    def feed(self, start: int, tokens: int, kind: type[Chunk] = Chunk) -> None:
        rows = np.arange(start, start + tokens, dtype=np.float32)[None, None, :, None].repeat(2, axis=3)
        pages = as_pages([(mx.array(rows), mx.array(-rows))])
        mx.eval(pages)
        self.pages.feed(kind(start, tokens, pages))


def expected(index: int, tokens: int) -> PageArray:
    page = SHAPE.empty()
    page[0, 0, 0, :tokens] = (np.arange(tokens) + index * PAGE_TOKENS)[:, None]
    page[0, 1] = -page[0, 0]
    return page


def read_all(pages: MlxPrefill, indices: Sequence[int]) -> list[PageArray]:
    return [pages.read(index).data for index in indices]


def test_pages_become_ready_with_their_chunks_and_are_let_go_when_read() -> None:
    made = Made(150)
    assert not made.pages.wait_ready(0, 0.0)
    made.feed(0, 128)
    assert [made.pages.wait_ready(index, 0.0) for index in (0, 1, 2)] == [True, True, False]
    assert (made.pages.unread_pages, made.pages.done) == (2, False)
    made.feed(128, 22)
    assert made.pages.done
    for index, tokens in ((1, 64), (0, 64), (2, 22)):
        page = made.pages.read(index)
        assert (page.index, page.tokens) == (index, tokens)
        np.testing.assert_array_equal(page.data, expected(index, tokens))
    assert made.pages.kept_pages == 0
    with pytest.raises(EngineError, match="read or passed over before"):
        made.pages.read(1)
    with pytest.raises(EngineError, match="page 3 of a prompt with 3 pages"):
        made.pages.wait_ready(3, 0.0)
    made.pages.close()


def test_held_pages_are_ready_at_once() -> None:
    made = Made(150, held=2)
    assert made.pages.kept_pages == 2
    assert made.pages.unread_pages == 0  # nothing of them waits in the engine
    first, second = read_all(made.pages, [0, 1])
    assert (first == 0).all()
    assert (second == 1).all()
    first[...] = 9  # a fresh array: the store does not see this
    assert (made.store.longest_prefix(KEYS[:1])[0] == 0).all()
    assert not made.pages.wait_ready(2, 0.0)
    assert made.store.stats().pinned == 2
    made.pages.close()
    assert made.store.stats().pinned == 0


def test_a_prompt_that_is_held_or_empty_is_done() -> None:
    assert Made(128, held=2).pages.done
    assert Made(0).pages.done
    assert not Made(129, held=2).pages.done


def test_full_pages_are_stored_when_read() -> None:
    made = Made(150)
    made.feed(0, 150)
    made.pages.skip_to(1)
    read_all(made.pages, [1, 2])
    assert made.store.longest_prefix(KEYS) == []  # page 0 was not read, so nobody finds page 1
    made.store.put(KEYS[0], SHAPE.empty())
    found = made.store.longest_prefix(KEYS)
    assert len(found) == 2  # the tail is no page to share
    np.testing.assert_array_equal(found[1], expected(1, 64))


def test_passed_over_pages_are_let_go_before_and_after_they_are_computed() -> None:
    made = Made(200)
    made.feed(0, 64)
    made.pages.skip_to(2)
    assert made.pages.kept_pages == 0
    made.feed(64, 136)
    assert made.pages.kept_pages == 2
    made.pages.skip_to(1)  # never backwards
    assert made.pages.kept_pages == 2


def test_infinite_kv_is_refused() -> None:
    made = Made(10)
    made.pages.feed(Chunk(0, 10, as_pages([(mx.full((1, 1, 10, 2), 1e9), mx.zeros((1, 1, 10, 2)))])))
    with pytest.raises(EngineError, match="page 0 holds NaN or Inf"):
        made.pages.read(0)


def test_a_failure_reaches_who_waits_and_stays() -> None:
    made = Made(100)
    waiter = Waiter(lambda: made.pages.read(1))
    made.pages.fail(EngineError("out of memory"))
    waiter.join()
    assert isinstance(waiter.error, EngineError)
    made.feed(0, 100)
    assert made.pages.kept_pages == 0
    made.pages.close()
    with pytest.raises(EngineError, match="out of memory"):
        made.pages.wait_ready(0, 0.0)


class SlowChunk(Chunk):
    """Is copied for as long as the test wants."""

    entered = threading.Event()
    leave = threading.Event()

    def copy_page(self, index: int) -> PageArray:
        self.entered.set()
        assert self.leave.wait(60)
        return super().copy_page(index)


def test_close_waits_for_a_copy_that_runs() -> None:
    made = Made(64)
    made.feed(0, 64, SlowChunk)
    reader = Waiter(lambda: made.pages.read(0))
    assert SlowChunk.entered.wait(60)
    closers = [Waiter(made.pages.close) for _ in range(2)]
    with pytest.raises(HandoffCancelledError):
        made.pages.wait_ready(0, 60.0)  # refused as soon as the close has begun
    assert made.closed == []
    SlowChunk.leave.set()
    for waiter in (reader, *closers):
        waiter.join()
        assert waiter.error is None
    assert made.closed == [made.pages]
