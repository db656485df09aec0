"""Stream: one handoff's pages crossing the page server under the byte budget, in order.

Per page: reserve credit, then the payload, then its header, so whoever reads a header finds the payload. The reader
gives the credit back only when the engine has the page. Everything that blocks does so in slices of 250 ms and calls
`check()` between them, which raises when the work is to end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis
from redis.exceptions import OutOfMemoryError

from pipeline.broker.connect import translate
from pipeline.broker.credit import (
    BudgetGauges,
    Credit,
    entry_id,
    gauges,
    heartbeat,
    raise_fence,
    reap,
    release,
    repeated,
)
from pipeline.errors import (
    CapacityError,
    CrossfillError,
    DeadlineError,
    FrameError,
    PageMissingError,
    StaleAttemptError,
)
from pipeline.frame import Commit, Frame, FrameReader, FrameWriter, Header, Kind
from pipeline.header import decode
from pipeline.page import Page
from pipeline.settings import BrokerSettings

__all__ = ["BudgetGauges", "PageReader", "PageWriter", "gauges", "heartbeat", "raise_fence", "reap", "release"]

SLICE_S = 0.25  # longest time without a look at `check`
BATCH = 16  # headers read at once; a header is a few hundred bytes
MAX_PATIENCE_S = 5.0  # how long a full server is asked again before the handoff fails
_RETRY_S = 0.05


class PageWriter:
    """P's end. `blocking` is a client without a reply timeout. Not for two threads at once.

    Raises StaleAttemptError as soon as another attempt owns the handoff, CapacityError when the server stays full
    for `patience_s`, BrokerError when it is unreachable, and whatever `check` raises.
    """

    def __init__(
        self,
        client: Redis,
        blocking: Redis,
        frames: FrameWriter,
        settings: BrokerSettings,
        check: Callable[[], None],
        *,
        patience_s: float = MAX_PATIENCE_S,
    ) -> None:
        self._credit = Credit(client, frames.handoff_id, frames.attempts, settings)
        self._blocking = blocking
        self._frames = frames
        self._check = check
        self._patience_s = patience_s
        self.bytes_written = 0  # payload bytes, after the codec
        self.pages_written = 0

    def open(self) -> None:
        self._send(self._frames.sequence, self._frames.open())

    def write(self, page: Page) -> None:
        """Block until there is credit, then send; returns when the server has the page.

        Raises EngineError when the page is not canonical, BudgetTooSmallError when no credit can ever hold it.
        """
        sequence = self._frames.sequence
        frame = self._frames.page(page)
        self._await_credit(sequence, self._frames.shape.page_bytes)
        try:
            self._send(sequence, frame)
        except CapacityError:
            self._credit.give_back(sequence)
            raise
        self.bytes_written += len(frame.payload)
        self.pages_written += 1

    def commit(self, first_tokens: Sequence[int] = ()) -> None:
        """All pages are there."""
        self._send(self._frames.sequence, self._frames.commit(first_tokens))

    def abort(self, code: str, message: str) -> None:
        """P gives up; D reads why. Passes on a full server."""
        self._send(self._frames.sequence, self._frames.abort(code, message))

    def _await_credit(self, sequence: int, size: int) -> None:
        """The wish is for the raw size: what a codec saves is given back with the header."""
        patience = _Patience(self._patience_s, self._check)
        while True:
            self._check()
            try:
                if self._credit.reserve(sequence, size):
                    return
            except OutOfMemoryError as error:
                patience.wait(error)
                continue
            with translate():  # a lost wake heals: the next slice asks again by itself
                self._blocking.blpop([self._credit.names.wake], timeout=SLICE_S)

    def _send(self, sequence: int, frame: Frame) -> None:
        patience = _Patience(self._patience_s, self._check)
        while (status := self._credit.send(sequence, *frame)) != "ok":
            patience.wait(status)


class PageReader:
    """D's end: pages come out verified, one at a time, then the Commit. Not for two threads at once.

    Raises FrameError for anything that is not the transfer `frames` expects, PageMissingError when a payload or the
    whole transfer is gone, AbortedError when P gave up, StaleAttemptError when a newer attempt took over.
    """

    def __init__(
        self,
        client: Redis,
        blocking: Redis,
        frames: FrameReader,
        settings: BrokerSettings,
        check: Callable[[], None],
        when_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`when_idle` is called where nothing has come: may more be expected?"""
        self._credit = Credit(client, frames.handoff_id, frames.attempts, settings)
        self._blocking = blocking
        self._frames = frames
        self._check = check
        self._when_idle = when_idle
        self._backlog: deque[tuple[bytes, bytes]] = deque()  # (entry id, header)
        self._last = "0-0"
        self._current: Header | None = None
        self._fetched: dict[int, bytes] = {}  # at most one payload, by sequence
        self.bytes_read = 0

    def read(self, timeout_s: float) -> Page | Commit:
        """The next page, a read-only view of what was received, or the end. Raises DeadlineError after `timeout_s`.

        The page before must have been `imported`.
        """
        if self._current is not None:
            raise RuntimeError("the page before was not imported")
        deadline = time.monotonic() + timeout_s
        while True:
            self._check()
            header = self._frames.header(self._next(deadline))
            if header.kind is Kind.PAGE:
                return self._page(header)
            if header.kind is Kind.COMMIT:
                return self._frames.commit(header)
            if header.kind is Kind.ABORT:
                raise self._frames.abort(header)
            self._frames.open(header)

    def imported(self) -> None:
        """The page just read is in the engine: its payload and credit go, and the next payload comes along."""
        if self._current is None:
            raise RuntimeError("no page to import")
        sequence, self._current = self._current.sequence, None
        following = _page_header(self._backlog[0][1]) if self._backlog else None
        if following is None:
            self._credit.give_back(sequence)
        else:
            limit = self._limit(following)
            fetched = self._credit.give_back_and_fetch(sequence, following.sequence, limit)
            self._fetched = {following.sequence: fetched}

    def _next(self, deadline: float) -> bytes:
        """The next header's bytes."""
        while not self._backlog:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineError("no page came in time: is the prefill worker alive?")
            self._fill(max(1, int(1000 * min(left_s, SLICE_S))))
        entry, data = self._backlog.popleft()
        own = entry_id(self._frames.attempts, 0).encode().split(b"-")[0]
        if entry.split(b"-")[0] != own:
            raise StaleAttemptError("a newer attempt writes this handoff")
        return data

    def _fill(self, block_ms: int) -> None:
        stream = self._credit.names.stream
        reply: Any = repeated(lambda: self._blocking.xread({stream: self._last}, count=BATCH, block=block_ms))
        self._check()
        if not reply:
            self._when_idle()
            self._require_fence()
            return
        for entry, fields in reply[0][1]:
            self._last = entry.decode()
            self._backlog.append((entry, fields.get(b"h", b"")))

    def _require_fence(self) -> None:
        """Nothing came: is the transfer still ours?"""
        fence = self._credit.fence()
        if fence is None:
            raise PageMissingError("the transfer is gone: it was released, its lease ended, or the broker restarted")
        if fence != str(self._frames.attempts):
            raise StaleAttemptError(f"attempt {self._frames.attempts} was replaced by {fence}")

    def _page(self, header: Header) -> Page:
        payload = self._fetched.pop(header.sequence, None) or self._fetch(header)
        try:
            page = self._frames.page(header, payload)
        except FrameError:  # damaged on the way, or at rest? Ask once more before P has to compute it again
            payload = self._fetch(header)
            page = self._frames.page(header, payload)
        self._current = header
        self.bytes_read += len(payload)
        return page

    def _fetch(self, header: Header) -> bytes:
        payload = self._credit.fetch(header.sequence, self._limit(header))
        if not payload:
            raise PageMissingError(f"the payload of page {header.index} is gone: it expired or was deleted")
        return payload

    def _limit(self, header: Header) -> int:
        """One byte more than belongs there tells a payload that is too long."""
        return min(header.payload_bytes, self._frames.shape.page_bytes) + 1


class _Patience:
    """A full server is asked again for a while, then the handoff fails and says what to do."""

    def __init__(self, limit_s: float, check: Callable[[], None]) -> None:
        self._deadline = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._check = check

    def wait(self, why: Exception | str) -> None:
        self._check()
        if isinstance(why, Exception) and not isinstance(why, OutOfMemoryError):
            with translate():
                raise why
        if time.monotonic() >= self._deadline:
            raise self._failure(why)
        time.sleep(_RETRY_S)

    def _failure(self, why: Exception | str) -> CrossfillError:
        if why == "missing":
            return CapacityError("the page server drops pages: set maxmemory-policy noeviction and raise maxmemory")
        return CapacityError(
            f"the page server was full for {self._limit_s:g} s: raise its maxmemory to budget_bytes plus a margin, "
            f"or lower broker.budget_bytes ({why})"
        )


def _page_header(data: bytes) -> Header | None:
    """What a header seems to be, unchecked: only to fetch ahead."""
    try:
        header = decode(data)
    except FrameError:
        return None
    return header if header.kind is Kind.PAGE else None
