"""Run: one prompt inside the reference engine. What the two roles share: its cache, its prefix, how it ends.

Rules: (1) fields are guarded by the engine's condition, but the cache's contents belong to whoever is `busy` with
it; (2) a run ends once, by finish, failure or close; (3) its pages go back when it has ended and nobody is busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline import prefix
from pipeline.engines.reference.model import KvCache, Model
from pipeline.engines.reference.room import Room
from pipeline.engines.store import PageStore, Pin
from pipeline.errors import CrossfillError, EngineError, HandoffCancelledError
from pipeline.page import PAGE_TOKENS, page_count
from pipeline.request import Request


class Host(Protocol):
    """What a run needs of its engine. The two counters are guarded by the condition."""

    condition: Condition
    model: Model
    room: Room
    store: PageStore
    chunk_tokens: int
    prompt_tokens_computed: int
    tokens_sampled: int

    def seed(self, salt: str) -> bytes: ...

    def leave(self, run: Run) -> None: ...


class Run:
    """One prompt. Its body is what is imported, or computed in chunks: all tokens but the last, or all of them where P
    draws the first token."""

    def __init__(self, host: Host, request: Request, capacity_tokens: int, *, seats: int = 0) -> None:
        """`seats`: sequences that will decode, each with its own copy of the cache."""
        self.host = host
        self.seats = seats
        self.request = request
        self.tokens = request.token_ids
        self.body_tokens = request.transfer_tokens
        self.present_tokens = 0  # rows of the cache that may be read
        self.capacity_tokens = capacity_tokens
        self.pages = max(1, seats) * page_count(capacity_tokens)
        self.ended = False
        self.error: CrossfillError | None = None
        self._busy = 0
        self._cache: KvCache | None = None
        self._pin: Pin | None = None
        self._stored_pages = 0
        self._link = host.seed(request.salt)  # chain key of the last page that is in the store

    # Under the condition

    @property
    def waiting_pages(self) -> int:
        """Pages that wait for export, or for decoding to begin."""
        raise NotImplementedError

    @property
    def wants_chunk(self) -> bool:
        """The engine should compute the next chunk of the body."""
        return not self.ended and self._cache is not None and self.present_tokens < self.body_tokens

    def begin(self) -> None:
        """Take room, and the longest prefix that is stored: copied, and pinned so that it stays for others."""
        cache = KvCache(self.host.model.shape, self.capacity_tokens)
        # Never the whole prompt: its last token must be computed, for the logits behind it.
        keys = prefix.chain(self._link, self.tokens[: (len(self.tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS])
        pin = self.host.store.pin(keys)
        for data in pin.pages:
            cache.append_page(data, PAGE_TOKENS)
        self.host.room.take(self.pages, self.seats)
        self._cache, self._pin = cache, pin
        self.present_tokens = cache.tokens
        self._stored_pages = len(pin.pages)
        self._link = keys[self._stored_pages - 1] if pin.pages else self._link

    def end(self, error: CrossfillError | None = None) -> None:
        """End, once; waiting calls wake and raise `error`."""
        if not self.ended:
            self.ended, self.error = True, error
        self._settle()

    def require_live(self) -> None:
        """Raise what ended the run."""
        if self.error is not None:
            raise self.error
        if self.ended:
            raise EngineError(f"handoff {self.request.handoff_id} has finished in this engine")

    def _settle(self) -> None:
        """Give everything back once nobody uses it."""
        if self.ended and not self._busy and self._cache is not None and self._pin is not None:
            self._cache = None
            self._pin.release()
            self.host.room.give(self.pages, self.seats)
        if self.ended and not self._busy:
            self.host.leave(self)
        self.host.condition.notify_all()

    # From any thread

    def close(self) -> None:
        """End as cancelled, and wait until engine and jobs have let go of the cache."""
        with self.host.condition:
            self.end(HandoffCancelledError(f"handoff {self.request.handoff_id} was closed"))
            self.host.condition.wait_for(lambda: not self._busy)

    @contextmanager
    def using(self) -> Iterator[KvCache]:
        """The cache, which stays until the block is left. Raises what ended the run."""
        with self.host.condition:
            self.require_live()
            if self._cache is None:
                raise EngineError(f"handoff {self.request.handoff_id} has not begun in this engine")
            self._busy += 1
            cache = self._cache
        try:
            yield cache
        finally:
            with self.host.condition:
                self._busy -= 1
                self._settle()

    # On the engine's thread

    def step(self) -> None:
        """Compute the next chunk of the body."""
        with self.using() as cache:
            chunk = self.tokens[cache.tokens : min(cache.tokens + self.host.chunk_tokens, self.body_tokens)]
            self._compute(chunk, cache)
            self.store_pages(cache, self.tokens)
            with self.host.condition:
                self.present_tokens = cache.tokens
                self.host.prompt_tokens_computed += len(chunk)
                self.host.condition.notify_all()

    def _compute(self, chunk: Sequence[int], cache: KvCache) -> None:
        self.host.model.prefill(chunk, cache)

    def store_pages(self, cache: KvCache, tokens: Sequence[int]) -> None:
        """Keep the full pages of the cache, which holds `tokens`, that are not stored yet."""
        full = cache.tokens // PAGE_TOKENS
        fresh: Sequence[int] = tokens[self._stored_pages * PAGE_TOKENS : full * PAGE_TOKENS]
        for key in prefix.chain(self._link, fresh):
            self.host.store.put(key, cache.page(self._stored_pages, PAGE_TOKENS).data)
            self._stored_pages += 1
            self._link = key


def require_logits(logits: NDArray[np.float32], request: Request) -> None:
    """Raise EngineError unless a token can be drawn from these."""
    if not np.isfinite(logits).all():
        raise EngineError(f"the logits of handoff {request.handoff_id} hold NaN or Inf: its KV is not sound")
