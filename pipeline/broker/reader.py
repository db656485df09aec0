"""PageReader: D's end of a transfer. A thread receives and verifies the next pages while the caller imports the last.

The credit of a page goes back only when the engine has it, in the round trip that asks for the next pages; the caller
sends it by itself only while the thread waits for P, or when it has become much. Pages lie in a few buffers that are
used again and again, so what is received ahead is bounded. Everything that blocks does so in slices of 250 ms with
`check()` between them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline.broker.connect import translate
from pipeline.broker.credit import Credit, entry_prefix
from pipeline.broker.payload import SLICE_S
from pipeline.broker.returns import Returns
from pipeline.broker.writer import ahead
from pipeline.budget import share
from pipeline.errors import DeadlineError, FrameError, PageMissingError, StaleAttemptError
from pipeline.frame import Commit, FrameReader, Header, Kind
from pipeline.header import decode
from pipeline.page import Page
from pipeline.settings import BrokerSettings

BATCH = 16  # headers read at once; a header is a few hundred bytes
_SHARES = 8  # of what the handoff may have in flight, so much may wait for the next round trip


class Received(NamedTuple):
    """A verified page, and the buffer in which it lies until it was imported."""

    page: Page
    sequence: int
    size: int  # as it came
    buffer: bytearray


class PageReader:
    """For one thread, which must `close` it. From the first `read` on it has a second one of its own, which receives.

    Pages come out verified, one at a time, then the Commit. Raises FrameError for anything that is not the transfer
    `frames` expects, PageMissingError when a payload or the whole transfer is gone, AbortedError when P gave up,
    StaleAttemptError when a newer attempt took over, BrokerError when the server is unreachable.
    """

    def __init__(
        self,
        client: Redis,
        frames: FrameReader,
        settings: BrokerSettings,
        check: Callable[[], None],
        when_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`when_idle` is called, from the other thread, where nothing has come: may more be expected?"""
        credit = partial(Credit, client, frames.handoff_id, frames.attempts, settings)
        self._client = client
        self._check = check
        self._current: Received | None = None
        self._credit = credit(check)
        self._returns = Returns()
        self._much = share(settings.budget_bytes, frames.shape.page_bytes) // _SHARES
        self._returned_bytes = 0  # since they were last sent from here
        self._unanswered: list[int] = []  # given back from here, the reply has not been read
        self._closing = threading.Event()
        self._receiver = _Receiver(credit(self._require_open), frames, self._closing, when_idle, self._returns)
        self._thread = threading.Thread(target=self._receiver.run, name=f"receive-{frames.handoff_id[:8]}", daemon=True)
        self.bytes_read = 0

    def read(self, timeout_s: float) -> Page | Commit:
        """The next page, a read-only view that is valid until `imported`, or the end. Raises DeadlineError.

        The page before must have been `imported`.
        """
        if self._current is not None:
            raise RuntimeError("the page before was not imported")
        if self._thread.ident is None:
            self._thread.start()
        item = self._next(timeout_s)
        if isinstance(item, Exception):
            self._receiver.items.put(item)  # asked again, it says the same
            raise item
        if isinstance(item, Commit):
            self._give_back()
            self._settle()
            return item
        self._current = item
        self.bytes_read += item.size
        return item.page

    def imported(self) -> None:
        """The page just read is in the engine: its buffer is used again; its payload and credit go, at the latest when
        P is waited for."""
        if self._current is None:
            raise RuntimeError("no page to import")
        received, self._current = self._current, None
        self._returns.put((received.sequence,))
        self._receiver.free.put(received.buffer)
        self._returned_bytes += received.size
        if self._returned_bytes >= self._much:
            self._give_back()

    def close(self) -> None:
        """End the thread, whatever it waits for, and let the connections go. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._receiver.close()
        self._credit.link.close()

    def _next(self, timeout_s: float) -> Received | Commit | Exception:
        if self._receiver.waits and self._receiver.items.empty():
            self._give_back()
        deadline = time.monotonic() + timeout_s
        while True:
            self._check()
            left_s = deadline - time.monotonic()
            try:
                return self._receiver.items.get(timeout=max(0.0, min(left_s, SLICE_S)))
            except queue.Empty:
                if left_s <= 0:
                    raise DeadlineError("no page came in time: is the prefill worker alive?") from None

    def _give_back(self) -> None:
        """Without waiting for the reply: it comes while the engine works."""
        self._returned_bytes = 0
        if not (returned := self._returns.take()):
            return
        self._settle()
        self._unanswered = returned
        with translate(self._client):
            try:
                self._credit.link.send([self._credit.returning(self._unanswered)], 1)
            except RedisConnectionError:
                self._settle()

    def _settle(self) -> None:
        """Read the reply to the last give-back; without one it is given back once more, which changes nothing."""
        sequences, self._unanswered = self._unanswered, []
        if not sequences:
            return
        with translate(self._client):
            try:
                reply = self._credit.link.reply() if self._credit.link.due else None
            except RedisConnectionError:
                reply = None
        if not isinstance(reply, int):
            self._credit.give_back(sequences)

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise _ClosedError


class _ClosedError(Exception):
    """The reader was closed: nobody waits for what comes."""


class _Receiver:
    """What the thread does: everything between the socket and a verified page, put into `items` in order."""

    def __init__(
        self,
        credit: Credit,
        frames: FrameReader,
        closing: threading.Event,
        when_idle: Callable[[], None],
        returns: Returns,
    ) -> None:
        self.items: queue.SimpleQueue[Received | Commit | Exception] = queue.SimpleQueue()
        self.free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._unmade = ahead(frames.shape.page_bytes)  # buffers that were never needed so far
        self._credit = credit
        self._frames = frames
        self._closing = closing
        self._when_idle = when_idle
        self._returns = returns
        self.waits = False  # for P: set before `returns` are taken, so what comes later is seen by one of the threads
        self._backlog: deque[tuple[bytes, Header | FrameError]] = deque()  # (entry id, what is in it, unchecked)
        self._last = "0-0"
        self._own = entry_prefix(frames.attempts).encode()

    def run(self) -> None:
        try:
            while not self._closing.is_set():
                if self._step():
                    return
        except _ClosedError:
            pass
        except Exception as error:
            self.items.put(error)
        finally:
            self.close()

    def close(self) -> None:
        self._credit.link.close()

    def _step(self) -> bool:
        """Headers, or pages, or one frame of another kind. True when nothing more will come."""
        if not self._backlog:
            self._fill()
            return False
        if pages := self._pages_ahead():
            self._receive(pages)
            return False
        header = self._header()
        self._backlog.popleft()
        if header.kind is Kind.OPEN:
            self._frames.open(header)
            return False
        self.items.put(self._frames.commit(header) if header.kind is Kind.COMMIT else self._frames.abort(header))
        return True

    def _fill(self) -> None:
        self.waits = True
        found = self._credit.headers(self._last, BATCH, int(1000 * SLICE_S), self._returns.take())
        self.waits = False
        if not found:
            self._when_idle()
            self._require_fence()
            return
        self._last = found[-1][0].decode()
        self._backlog.extend((entry, _decoded(data)) for entry, data in found)

    def _require_fence(self) -> None:
        """Nothing came: is the transfer still ours?"""
        fence = self._credit.fence()
        if fence is None:
            raise PageMissingError("the transfer is gone: it was released, its lease ended, or the broker restarted")
        if fence != str(self._frames.attempts):
            raise StaleAttemptError(f"attempt {self._frames.attempts} was replaced by {fence}")

    def _pages_ahead(self) -> list[Header]:
        """The next headers while they seem to be pages; unchecked: only to fetch."""
        found = []
        for _, header in self._backlog:
            if isinstance(header, FrameError) or header.kind is not Kind.PAGE:
                break
            found.append(header)
        return found

    def _header(self) -> Header:
        """The next one, checked."""
        entry, header = self._backlog[0]
        if not entry.startswith(self._own):
            raise StaleAttemptError("a newer attempt writes this handoff")
        if isinstance(header, FrameError):
            raise header
        self._frames.check(header)
        return header

    def _receive(self, headers: list[Header]) -> None:
        """As many of these pages as there are buffers for, asked for at once."""
        buffers = deque(self._buffers(len(headers)))
        places = zip(headers, buffers, strict=False)
        wanted = [(header.sequence, memoryview(buffer)[: header.payload_bytes]) for header, buffer in places]
        payloads = self._credit.fetch_all(wanted, self._returns)
        for _, target in wanted:
            header = self._header()
            try:
                payload = next(payloads)
                page = self._frames.page(header, payload.toreadonly())
            except FrameError:  # damaged on the way, or at rest? Ask once more before P has to compute it again
                self._credit.link.drop()
                page, payload = self._again(header, target)
            self.items.put(Received(page, header.sequence, len(payload), buffers.popleft()))
            self._backlog.popleft()
            if not self._credit.link.due:
                break
        for buffer in buffers:
            self.free.put(buffer)

    def _again(self, header: Header, target: memoryview) -> tuple[Page, memoryview]:
        payload = self._credit.fetch(header.sequence, target)
        if not payload:
            raise PageMissingError(f"the payload of page {header.index} is gone: it expired or was deleted")
        return self._frames.page(header, payload.toreadonly()), payload

    def _buffers(self, count: int) -> list[bytearray]:
        """Up to `count`, at least one: waits for the importer."""
        found: list[bytearray] = []
        while len(found) < count:
            try:
                found.append(self.free.get(timeout=0 if found or self._unmade else SLICE_S))
            except queue.Empty:
                if self._unmade:
                    self._unmade -= 1
                    found.append(bytearray(self._frames.shape.page_bytes))
                elif found:
                    break
                elif self._closing.is_set():
                    raise _ClosedError from None
        return found


def _decoded(data: bytes) -> Header | FrameError:
    """What is wrong with a header counts only when its turn comes."""
    try:
        return decode(data)
    except FrameError as error:
        return error
