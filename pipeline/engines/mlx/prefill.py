"""Prefill: the pages of one prompt, from the chunk that computed them to the thread that reads them.

The engine thread feeds chunks and never waits. Pages of a prefix that was held are there from the start; a chunk is
let go once every page of it was read or passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pipeline.engines.mlx.cache import Chunk
from pipeline.engines.store import PageStore, Pin
from pipeline.errors import CrossfillError, EngineError, HandoffCancelledError
from pipeline.logprob import TokenLogprob
from pipeline.page import PAGE_TOKENS, Page, PageArray, page_count, page_tokens, require_finite


class MlxPrefill:
    """See `base.Prefill`. `keys` are the chain keys of all pages, `pin` holds the leading ones in `store`.

    `on_free` is called when pages were read or passed over, `on_close` once, when nothing is copied any more.
    """

    def __init__(
        self,
        tokens: int,
        keys: Sequence[bytes],
        pin: Pin,
        store: PageStore,
        *,
        on_free: Callable[[], None],
        on_close: Callable[[MlxPrefill], None],
    ) -> None:
        self._tokens = tokens
        self._keys = keys
        self._pin = pin
        self._store = store
        self._on_free = on_free
        self._on_close = on_close
        self._changed = threading.Condition()
        self._held: dict[int, PageArray] = dict(enumerate(pin.pages))
        self._chunks: dict[int, Chunk] = {}  # by page
        self._skipped = 0
        self._ready_tokens = len(pin.pages) * PAGE_TOKENS
        self._done = self._ready_tokens == tokens
        self._first_tokens: tuple[int, ...] = ()
        self._first_logprobs: tuple[TokenLogprob, ...] = ()
        self._copies = 0
        self._failure: CrossfillError | None = None
        self._closing = False
        self._closed = threading.Event()

    # The engine's side.

    @property
    def unread_pages(self) -> int:
        """Computed pages that wait to be read: what the quota counts."""
        return len(self._chunks)

    @property
    def kept_pages(self) -> int:
        """Pages kept for reading, held ones included."""
        return len(self._chunks) + len(self._held)

    def feed(
        self, chunk: Chunk, first_tokens: tuple[int, ...] = (), first_logprobs: tuple[TokenLogprob, ...] = ()
    ) -> None:
        """`first_tokens` come with the last chunk, where the request wants them."""
        with self._changed:
            self._first_tokens = first_tokens
            self._first_logprobs = first_logprobs
            if self._failure is None:
                self._chunks.update((index, chunk) for index in chunk.pages if index >= self._skipped)
            self._ready_tokens = chunk.start + chunk.tokens
            self._done = self._ready_tokens == self._tokens
            self._changed.notify_all()

    def fail(self, error: CrossfillError) -> None:
        """End it: every waiting and later call raises `error`. The first error stays."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # The job's side.

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return self._first_tokens

    @property
    def first_logprobs(self) -> tuple[TokenLogprob, ...]:
        return self._first_logprobs

    @property
    def done(self) -> bool:
        return self._done

    def wait_ready(self, index: int, timeout_s: float) -> bool:
        with self._changed:
            return self._wait_ready(index, timeout_s)

    def wait_done(self, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._done, timeout_s)
            if self._failure is not None:
                raise self._failure
            return self._done

    def read(self, index: int) -> Page:
        with self._changed:
            self._wait_ready(index, None)
            source = self._held.get(index)
            chunk = self._chunks.get(index)
            self._copies += 1
        try:
            page = self._copy(index, source, chunk)
        finally:
            with self._changed:
                self._copies -= 1
                self._changed.notify_all()
        self._free(index, index + 1)
        return page

    def skip_to(self, index: int) -> None:
        with self._changed:
            first, self._skipped = self._skipped, max(self._skipped, index)
        self._free(first, index)

    def close(self) -> None:
        self.fail(HandoffCancelledError("the prefill was closed"))
        with self._changed:
            first, self._closing = not self._closing, True
            self._changed.wait_for(lambda: self._copies == 0)
        if first:
            self._on_close(self)
            self._chunks.clear()
            self._held.clear()
            self._pin.release()
            self._closed.set()
        self._closed.wait()

    def _wait_ready(self, index: int, timeout_s: float | None) -> bool:
        if not 0 <= index < page_count(self._tokens):
            raise EngineError(f"page {index} of a prompt with {page_count(self._tokens)} pages")
        last = min((index + 1) * PAGE_TOKENS, self._tokens)
        self._changed.wait_for(lambda: self._failure is not None or self._ready_tokens >= last, timeout_s)
        if self._failure is not None:
            raise self._failure
        return self._ready_tokens >= last

    def _copy(self, index: int, held: PageArray | None, chunk: Chunk | None) -> Page:
        tokens = page_tokens(index, self._tokens)
        if held is not None:
            return Page(index, tokens, held.copy())
        if chunk is None:
            raise EngineError(f"page {index} was read or passed over before")
        page = Page(index, tokens, chunk.copy_page(index))
        require_finite(page)
        if tokens == PAGE_TOKENS and self._store.cap_bytes:
            self._store.put(self._keys[index], page.data.copy())
        return page

    def _free(self, first: int, last: int) -> None:
        with self._changed:
            for index in range(first, last):
                self._held.pop(index, None)
                self._chunks.pop(index, None)
        self._on_free()
