"""Admission: room for one prompt, its KV coming in or being computed here, and the decoding that follows.

Pages go to the device on the job's thread; the engine thread puts them into place, a batch at a time, while others are
still on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.engines.base import TokenStep
from pipeline.engines.mlx.batch import Outbox, Row
from pipeline.engines.mlx.cache import BATCH_PAGES, STEP, Assembly
from pipeline.engines.mlx.core import Core
from pipeline.engines.mlx.memory import Share
from pipeline.engines.mlx.prefill import MlxPrefill
from pipeline.engines.mlx.prompt import Prompt
from pipeline.engines.store import Pin
from pipeline.errors import CrossfillError, EngineError, HandoffCancelledError
from pipeline.logprob import TokenLogprob
from pipeline.page import PAGE_TOKENS, Page, PageArray, page_count, page_tokens


class _Admission:
    """What both kinds share: a row for each sample, the pinned pages, the part of the memory, and their end."""

    def __init__(self, core: Core, rows: Sequence[Row], outbox: Outbox, pin: Pin, share: Share) -> None:
        self._core = core
        self._rows = rows
        self._outbox = outbox
        self._pin = pin
        self._share = share
        self._tokens = rows[0].prompt_tokens - 1
        self._held_pages = len(pin.pages)
        self._decoding = False
        self._failure: CrossfillError | None = None
        self._lock = threading.RLock()  # held while pages are copied: close() waits for that
        self._closing = False
        self._closed = threading.Event()

    @property
    def held_pages(self) -> int:
        return self._held_pages

    @property
    def kept_pages(self) -> int:
        return len(self._pin.pages)

    @property
    def unread_pages(self) -> int:
        return 0

    def fail(self, error: CrossfillError) -> None:
        self._failure = self._failure or error
        self._outbox.fail(error)

    def close(self) -> None:
        self.fail(HandoffCancelledError("the request was closed"))
        self._stop()
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._withdraw()
            self._pin.release()
            self._core.memory.release(self._share)
            self._core.exit(self)
            self._closed.set()
        self._closed.wait()

    def keep_pages(self) -> None:
        self._rows[0].keep = True

    def export_pages(self) -> Iterator[Page]:
        """Read out of the batch, or, before decoding, out of what was imported."""
        with self._lock:
            if self._closing:
                raise HandoffCancelledError("the request was closed")
            chunk = self._core.prompt(self._rows[0])
            if chunk is None:
                return iter(self._written_pages())
            return iter([Page(at, page_tokens(at, chunk.tokens), chunk.copy_page(at)) for at in chunk.pages])

    def _written_pages(self) -> list[Page]:
        """What came in so far."""
        return []

    def _stop(self) -> None:
        """Wake whoever waits for anything but a token."""

    def _withdraw(self) -> None:
        """Take the work from the engine thread and let the memory go."""
        raise NotImplementedError

    def _begin_decoding(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._decoding:
            raise EngineError("this request is decoding already")
        self._decoding = True


class ImportAdmission(_Admission):
    """See `base.Admission`. Every page that is not held is imported. `keys` are the chain keys of all pages."""

    def __init__(
        self, core: Core, rows: Sequence[Row], outbox: Outbox, pin: Pin, share: Share, keys: Sequence[bytes]
    ) -> None:
        super().__init__(core, rows, outbox, pin, share)
        self._keys = keys
        self._next = len(pin.pages)
        self._full: list[PageArray] = []  # imported full pages: for the store, once committed
        self._on_device: list[Any] = []  # imported pages that are not in place yet
        # Room behind the prompt, so that the first steps need not copy all of it into a larger cache.
        self._assembly = Assembly(core.model, self._tokens + min(rows[0].limit, STEP))
        core.enter(self)
        for index, data in enumerate(pin.pages, 1):
            self._bring(index, data)

    @property
    def kept_pages(self) -> int:
        return self._next

    def import_page(self, page: Page) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._decoding:
                raise EngineError("this request is decoding already")
            self._require_next(page)
            self._bring(page.index + 1, page.data)
            if page.tokens == PAGE_TOKENS and self._core.store.cap_bytes:
                self._full.append(page.data.copy())  # the caller's buffer is the network's
            self._next += 1

    def _bring(self, pages: int, data: PageArray) -> None:
        """Take the last of now `pages` pages to the device; into place with its batch, or with the prompt's last."""
        self._on_device.append(mx.array(data))
        if len(self._on_device) == BATCH_PAGES or pages == page_count(self._tokens):
            first = pages - len(self._on_device)
            self._core.fill(self._rows[0], self._assembly, first, self._on_device)
            self._on_device = []

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        """`first_tokens` are not used: the last prompt token is computed here, so every token is drawn here."""
        with self._lock:
            if self._next != page_count(self._tokens) and self._failure is None:
                raise EngineError(f"{self._next} of {page_count(self._tokens)} pages are there: cannot decode")
            self._begin_decoding()
            self._core.join(self._rows, lambda: self._assembly.take(self._tokens))
            for key, data in zip(self._keys[self._held_pages :], self._full, strict=False):  # the tail has no data
                self._core.store.put(key, data)
            self._full.clear()
        return self._outbox.read(len(self._rows))

    def _written_pages(self) -> list[Page]:
        if self._decoding:  # on its way into the batch, or already out of it
            return []
        placed = self._core.placed(self._assembly, self._next - len(self._on_device))
        pages = [placed.copy_page(at) for at in placed.pages] if placed else []
        pages += [np.array(page) for page in self._on_device]
        return [Page(at, page_tokens(at, self._tokens), page) for at, page in enumerate(pages)]

    def _withdraw(self) -> None:
        self._core.withdraw(rows=self._rows, assembly=self._assembly)
        with self._lock:
            self._on_device.clear()
            self._full.clear()
            self._next = 0

    def _require_next(self, page: Page) -> None:
        pages = page_count(self._tokens)
        if page.index != self._next or self._next == pages:
            raise EngineError(f"page {page.index} came, {self._next} of {pages} was due")
        tokens = page_tokens(page.index, self._tokens)
        if page.tokens != tokens:
            raise EngineError(f"page {page.index} has {page.tokens} tokens, not {tokens}")
        if page.data.shape != self._core.model.shape.array:
            raise EngineError(f"a page of {page.data.shape} does not fit this model's {self._core.model.shape.array}")


class LocalAdmission(_Admission):
    """See `base.Admission`. The engine computes what it does not hold; compute begins with the admission."""

    def __init__(
        self,
        core: Core,
        rows: Sequence[Row],
        outbox: Outbox,
        pin: Pin,
        share: Share,
        pages: MlxPrefill,
        tokens: Sequence[int],
    ) -> None:
        super().__init__(core, rows, outbox, pin, share)
        self._pages = pages
        self._caches: list[Any] | None = None  # computed, decode() not called yet; engine thread
        self._wanted = False  # decode() called, not computed yet; engine thread
        self._prompt = Prompt(
            tokens,
            pin.pages,
            pages,
            room=len(tokens) + min(rows[0].limit, STEP),
            share=share,
            on_done=self._computed,
            on_fail=self.fail,
        )
        core.enter(self)
        core.submit(self._prompt)

    @property
    def kept_pages(self) -> int:
        return self._pages.kept_pages

    def fail(self, error: CrossfillError) -> None:
        self._pages.fail(error)
        super().fail(error)

    def import_page(self, page: Page) -> None:
        raise EngineError("this request was admitted to be computed here: nothing can be imported")

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        with self._lock:
            self._begin_decoding()
        self._core.loop.post(self._want)
        return self._steps()

    def _steps(self) -> Iterator[TokenStep]:
        """Store the prompt's pages while later chunks are computed, then pass the tokens on."""
        full = self._tokens // PAGE_TOKENS if self._core.store.cap_bytes else 0
        for index in range(self._held_pages, full):
            self._pages.read(index)
        self._pages.skip_to(page_count(self._tokens))
        yield from self._outbox.read(len(self._rows))

    def _want(self) -> None:
        self._wanted = True
        self._join_when_ready()

    def _computed(self, _: Prompt, caches: list[Any]) -> None:
        self._caches = caches
        self._join_when_ready()

    def _join_when_ready(self) -> None:
        if self._wanted and self._caches is not None and self._failure is None:
            caches, self._caches = self._caches, None
            self._core.join(self._rows, lambda: caches)

    def _stop(self) -> None:
        self._pages.close()

    def _withdraw(self) -> None:
        self._core.withdraw([self._prompt], self._rows)
        self._caches = None
