"""PageWriter: P's end of a transfer. The caller computes and frames the next page while a thread sends the last ones.

Per page: credit, then the payload, then its header, so whoever reads a header finds the payload. Credit is asked for
in advance, but only for pages that exist, in the same round trip as those that go. What waits is bounded. Everything
that blocks does so in slices of 250 ms with `check()` between them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from redis import Redis
from redis.exceptions import OutOfMemoryError

from pipeline.broker.connect import translate
from pipeline.broker.credit import Credit, Outgoing
from pipeline.broker.payload import SLICE_S
from pipeline.budget import Answer
from pipeline.errors import CapacityError, CrossfillError
from pipeline.frame import Frame, FrameWriter
from pipeline.logprob import TokenLogprob
from pipeline.page import Page
from pipeline.settings import MIB, BrokerSettings

MAX_PATIENCE_S = 5.0  # how long a full server is asked again before the handoff fails
AHEAD_BYTES = 4 * MIB  # pages framed and not yet sent; two at least
AHEAD_PAGES = 16
_RETRY_S = 0.05


class PageWriter:
    """For one thread, which must `close` it. From `open` on it has a second one of its own, which sends.

    Every method raises what ended the sending: StaleAttemptError as soon as another attempt owns the handoff,
    CapacityError when the server stays full for `patience_s`, BudgetTooSmallError when no credit can ever hold a page,
    BrokerError when the server is unreachable; and whatever `check` raises.
    """

    def __init__(
        self,
        client: Redis,
        frames: FrameWriter,
        settings: BrokerSettings,
        check: Callable[[], None],
        *,
        patience_s: float = MAX_PATIENCE_S,
    ) -> None:
        self._frames = frames
        self._check = check
        self._ahead = ahead(frames.shape.page_bytes)
        self._credit_for = partial(Credit, client, frames.handoff_id, frames.attempts, settings)
        self._credit = self._credit_for(self._require_open)
        self._sender = _Sender(client, self._credit, frames, patience_s, self._require_open)
        self._changed = self._sender.changed
        self._thread = threading.Thread(target=self._sender.run, name=f"send-{frames.handoff_id[:8]}", daemon=True)

    @property
    def pages_written(self) -> int:
        """Pages on the server."""
        return self._sender.pages

    @property
    def bytes_written(self) -> int:
        """Payload bytes on the server, after the codec."""
        return self._sender.bytes

    def open(self) -> None:
        self._thread.start()
        self._put(self._frames.sequence, self._frames.open())

    def write(self, page: Page) -> None:
        """Frame the page and leave it to the sender; blocks while two pages or 4 MiB wait. `page.data` must not change
        until `flush`. Raises EngineError when the page is not canonical."""
        self._put(self._frames.sequence, self._frames.page(page))

    def flush(self) -> None:
        """Block until the server has everything that was written."""
        self._wait(lambda: not self._sender.waiting)

    def commit(self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()) -> None:
        """All pages are there. Returns when the server has that, too."""
        self._put(self._frames.sequence, self._frames.commit(first_tokens, first_logprobs))
        self.flush()

    def abort(self, code: str, message: str) -> None:
        """P gives up; D reads why. What waits to be sent is dropped. Passes on a full server."""
        self.close()
        frame = Outgoing(self._frames.sequence, *self._frames.abort(code, message), anywhere=True)
        credit = self._credit_for(self._check)
        with closing(credit.link):
            credit.exchange([frame], [], 0)

    def close(self) -> None:
        """End the thread, whatever it waits for, and let the connection go. Idempotent."""
        with self._changed:
            self._sender.closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._credit.link.close()

    def _put(self, sequence: int, frame: Frame) -> None:
        self._wait(lambda: len(self._sender.waiting) < self._ahead)
        with self._changed:
            self._sender.waiting.append(Outgoing(sequence, *frame))
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        while True:
            self._check()
            with self._changed:
                if self._changed.wait_for(lambda: self._sender.error is not None or ready(), SLICE_S):
                    if self._sender.error is not None:
                        raise self._sender.error
                    return

    def _require_open(self) -> None:
        if self._sender.closing:
            raise _ClosedError


def ahead(page_bytes: int) -> int:
    """Pages that may wait to be sent or to be imported."""
    return max(2, min(AHEAD_PAGES, AHEAD_BYTES // page_bytes))


class _ClosedError(Exception):
    """The writer was closed: nobody waits for what the sender does."""


class _Sender:
    """What the thread does. `changed` guards everything public; only this thread takes from `waiting`."""

    def __init__(
        self, client: Redis, credit: Credit, frames: FrameWriter, patience_s: float, check: Callable[[], None]
    ) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Outgoing] = deque()
        self.error: Exception | None = None
        self.closing = False
        self.pages = 0
        self.bytes = 0
        self._client = client
        self._credit = credit
        self._size = frames.shape.page_bytes
        self._choice = frames.choice
        self._patience_s = patience_s
        self._check = check
        self._granted: set[int] = set()  # sequences that hold credit and are not sent
        self._waiting_since_s: float | None = None  # pages could go: for credit, or because they are being sent
        self._impatient_at: float | None = None  # a full server has been asked in vain since some time before

    def run(self) -> None:
        try:
            while frames := self._next():
                self.deliver(frames)
        except _ClosedError:
            pass
        except Exception as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def deliver(self, frames: Sequence[Outgoing]) -> None:
        """One round: what has credit goes, credit for the rest is asked for."""
        ready = list(self._ready(frames))
        wanted = [frame.sequence for frame in frames[len(ready) :] if frame.payload]
        if self._waiting_since_s is None and any(frame.payload for frame in frames):
            self._waiting_since_s = time.monotonic()
        sent, grant = self._credit.exchange(ready, wanted, self._size)
        self._observe([len(frame.payload) for frame in ready[: sent.number] if frame.payload])
        self._granted.update(wanted[: grant.number])
        self._settle(ready[: sent.number])
        if sent.why is not None:
            self._be_patient(sent.why)
        elif grant.why is Answer.WAIT and not self._granted:
            self._credit.await_wake(SLICE_S)
        elif isinstance(grant.why, Exception):
            self._be_patient(grant.why)

    def _observe(self, sizes: Sequence[int]) -> None:
        """Payloads of these sizes are on the server."""
        if sizes and self._waiting_since_s is not None:
            self._choice.observe(len(sizes) * self._size, sum(sizes), time.monotonic() - self._waiting_since_s)
            self._waiting_since_s = None

    def _next(self) -> list[Outgoing]:
        """Everything that waits, as soon as anything does; nothing when it is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing or self.waiting)
            return [] if self.closing else list(self.waiting)

    def _ready(self, frames: Sequence[Outgoing]) -> Sequence[Outgoing]:
        for count, frame in enumerate(frames):
            if frame.payload and frame.sequence not in self._granted:
                return frames[:count]
        return frames

    def _settle(self, sent: Sequence[Outgoing]) -> None:
        if not sent:
            return
        self._impatient_at = None
        with self.changed:
            for frame in sent:
                self.waiting.popleft()
                self._granted.discard(frame.sequence)
                self.pages += bool(frame.payload)
                self.bytes += len(frame.payload)
            self.changed.notify_all()

    def _be_patient(self, why: Exception | str) -> None:
        """A full server is asked again for a while, then the handoff fails and gives its credit back."""
        self._check()
        if isinstance(why, Exception) and not isinstance(why, OutOfMemoryError):
            with translate(self._client):
                raise why
        now = time.monotonic()
        if self._impatient_at is None:
            self._impatient_at = now + self._patience_s
        if now >= self._impatient_at:
            self._credit.give_back(sorted(self._granted))
            raise self._failure(why)
        time.sleep(_RETRY_S)

    def _failure(self, why: Exception | str) -> CrossfillError:
        if why in ("missing", "gap"):
            return CapacityError("the page server drops pages: set maxmemory-policy noeviction and raise maxmemory")
        return CapacityError(
            f"the page server was full for {self._patience_s:g} s: raise its maxmemory to budget_bytes plus a margin, "
            f"or lower broker.budget_bytes ({why})"
        )
