"""Ticket: one request inside an engine that copies pages on the threads of jobs. What vLLM's and SGLang's share.

How a request ends inside its engine differs and is the subclass's; how its waiting calls end, and that no copy runs
when it does, is the same and is here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from pipeline.contract import Contract
from pipeline.engines.base import Check, wait_in_slices
from pipeline.errors import CrossfillError, DeadlineError, EngineError, HandoffCancelledError
from pipeline.page import Page, PageArray, page_tokens
from pipeline.request import Request


class Ticket:
    """Fields are guarded by `changed`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.changed = threading.Condition()
        self._copying = 0  # page copies running right now, on the threads of jobs
        self._closed = False
        self._error: CrossfillError | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def error(self) -> CrossfillError | None:
        return self._error

    def fail(self, error: CrossfillError) -> None:
        """Every waiting and later call raises `error`. The first stays."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    def _drain(self) -> None:
        """Wake every waiting call, and wait until no copy runs; none will ever begin."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._copying)

    def _require_alive(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise HandoffCancelledError(f"handoff {self.request.handoff_id} was closed")

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Caller holds `changed`. False after the timeout; raises what ended the ticket."""
        done = self.changed.wait_for(lambda: self._error is not None or self._closed or ready(), timeout_s)
        self._require_alive()
        return done

    def _end_copy(self) -> None:
        with self.changed:
            self._copying -= 1
            self.changed.notify_all()


class Unread:
    """Which of a prompt's `pages` are still to be read, in any order and once each. Guarded by its owner's lock.

    Those that a copy of another page took along wait here until they are taken, or passed over.
    """

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._next = 0  # pages before this one were read or skipped
        self._ahead: set[int] = set()  # read ahead of `_next`
        self._copied: dict[int, PageArray] = {}

    @property
    def first(self) -> int:
        """Every page before it was read or skipped."""
        return self._next

    @property
    def count(self) -> int:
        return self._pages - self._next - len(self._ahead)

    def require_page(self, index: int) -> None:
        """Raises EngineError."""
        if not 0 <= index < self._pages:
            raise EngineError(f"there is no page {index}: the prompt has {self._pages} pages to transfer")

    def require(self, index: int) -> None:
        """A page that was read or skipped is gone: EngineError."""
        if index < self._next or index in self._ahead:
            raise EngineError(f"page {index} was read or skipped already")

    @property
    def copied(self) -> list[int]:
        """Pages that were taken along and not taken yet, in order."""
        return sorted(self._copied)

    def keep(self, first: int, pages: Iterable[PageArray]) -> None:
        """Pages from `first` on came along with a copy."""
        self._copied.update(enumerate(pages, first))

    def take(self, index: int) -> PageArray | None:
        """The page, if an earlier copy took it along. A page that was read or skipped is gone: EngineError."""
        self.require(index)
        return self._copied.pop(index, None)

    def drop(self) -> None:
        """What was taken along will not be read."""
        self._copied.clear()

    def read(self, index: int) -> None:
        self._ahead.add(index)
        self.skip_to(0)

    def skip_to(self, index: int) -> None:
        self._next = max(self._next, min(index, self._pages))
        while self._next in self._ahead:
            self._next += 1
        self._ahead = {ahead for ahead in self._ahead if ahead > self._next}
        for passed in [copied for copied in self._copied if copied < self._next]:
            del self._copied[passed]


def require_next(page: Page, wanted: int, pages: int, request: Request) -> None:
    """Pages are imported in order, each with the tokens that belong there. Raises EngineError."""
    if page.index != wanted or wanted >= pages:
        raise EngineError(f"page {page.index} cannot be imported: {wanted} of {pages} pages are here")
    expected = page_tokens(page.index, request.transfer_tokens)
    if page.tokens != expected:
        raise EngineError(f"page {page.index} has {page.tokens} tokens, expected {expected}")


def require_fit(request: Request, limit: int, contract: Contract) -> None:
    """`limit`: tokens of context and of the KV pool, whichever are fewer. EngineError for what can never run."""
    tokens = len(request.token_ids)
    if tokens >= limit:  # one place is for the first token
        setting = "context_length" if limit == contract.context_length else "kv_cache_bytes"
        raise EngineError(f"a prompt of {tokens} tokens can never run here: {setting} allows {limit - 1}, raise it")
    if not all(0 <= token < contract.vocab_size for token in request.token_ids):
        raise EngineError(f"a token id is outside the vocabulary of {contract.vocab_size}")


class Waiting(Protocol):
    """A ticket that asks for room."""

    request: Request

    def wait_admitted(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


WaitingT = TypeVar("WaitingT", bound=Waiting)


def admitted(ticket: WaitingT, timeout_s: float, check: Check, engine: str) -> WaitingT:
    """`ticket` once it has room; closed on every other way out. Raises DeadlineError and whatever `check` raises."""
    try:
        if wait_in_slices(ticket.wait_admitted, timeout_s, check):
            return ticket
        tokens = len(ticket.request.token_ids)
        raise DeadlineError(f"{engine} had no room for {tokens} prompt tokens within {timeout_s:g} s")
    except BaseException:
        ticket.close()
        raise
