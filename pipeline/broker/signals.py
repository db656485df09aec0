"""Signals: what happens to a handoff, told to the worker threads that work on it.

One pub/sub connection per worker process. A notification only wakes; the truth is read from the ledger, and a
lost notification is healed by looking again every half second.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from redis import Redis
from redis.exceptions import RedisError

from pipeline.broker import keys
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.ledger import Ledger, Record, Role
from pipeline.errors import DeadlineError, HandoffCancelledError
from pipeline.handoff import TERMINAL, State

T = TypeVar("T")
_HEAL_S = 0.5
_ENDING = TERMINAL | {State.CANCELLING, State.DRAINING}
_log = logging.getLogger(__name__)


class Watch:
    """One worker thread's eye on one handoff."""

    def __init__(self, ledger: Ledger, handoff_id: str) -> None:
        self._ledger = ledger
        self._id = handoff_id
        self._changed = threading.Event()
        self._over = threading.Event()
        self._looked = time.monotonic()
        self._closers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._record: Record | None = None

    @property
    def stopped(self) -> bool:
        """The handoff is over because the API saw a stop string: a finish."""
        return self._record is not None and self._record.state is State.FINISHED

    def error(self, role: Role) -> ErrorInfo | None:
        """What the last attempt of `role` failed with, as far as this worker has looked."""
        return self._record.error(role) if self._record else None

    def on_over(self, close: Callable[[], None]) -> None:
        """Call `close` (from another thread) as soon as the handoff is cancelled or has ended."""
        with self._lock:
            self._closers.append(close)
            over = self._over.is_set()
        if over:
            close()

    def check(self) -> None:
        """Raise HandoffCancelledError when there is nothing left to work for. Cheap; call it often."""
        if not self._over.is_set() and time.monotonic() - self._looked > _HEAL_S:
            self.look()
        if self._over.is_set():
            raise HandoffCancelledError(f"handoff {self._id} is over")

    def wait_for(self, find: Callable[[Record], T | None], timeout_s: float, what: str) -> T:
        """Block until `find` sees in the record what it looks for. Raises DeadlineError, HandoffCancelledError."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._changed.clear()
            record = self.look()
            self.check()
            assert record is not None
            if (found := find(record)) is not None:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"waited {timeout_s:g} s for {what}")
            self._changed.wait(min(left, _HEAL_S))

    def look(self) -> Record | None:
        """Read the ledger now."""
        self._looked = time.monotonic()
        record = self._record = self._ledger.load(self._id)
        if record is None or record.state in _ENDING:
            self._end()
        return record

    def notify(self, event: bytes) -> None:
        """Wake the waiter; `check` looks at once. What is to be closed is closed on a thread of its own."""
        self._looked = float("-inf")
        self._changed.set()
        if event in (b"cancel", b"stop"):
            # closing drains a device: not on the thread that wakes everybody else
            threading.Thread(target=self.look, name=f"close-{self._id[:8]}", daemon=True).start()

    def _end(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            closers = list(self._closers)
        self._changed.set()
        for close in closers:
            close()


class Signals:
    """The process's subscription; `watch` is used by job threads, `close` ends the thread."""

    def __init__(self, client: Redis, ledger: Ledger) -> None:
        self._client = client
        self._ledger = ledger
        self._watches: dict[bytes, list[Watch]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="signals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    @contextlib.contextmanager
    def watch(self, handoff_id: str) -> Iterator[Watch]:
        watch, channel = Watch(self._ledger, handoff_id), keys.HandoffKeys(handoff_id).events.encode()
        with self._lock:
            self._watches.setdefault(channel, []).append(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._watches[channel].remove(watch)
                if not self._watches[channel]:
                    del self._watches[channel]

    def active(self) -> list[str]:
        """Ids of the handoffs this process works on."""
        with self._lock:
            return [keys.handoff_of(channel.decode()) for channel in self._watches]

    def _pump(self) -> None:
        while not self._closing.is_set():
            try:
                self._listen()
            except (RedisError, OSError) as error:
                _log.warning("signals: %s; subscribing again", error)
                self._closing.wait(_HEAL_S)

    def _listen(self) -> None:
        with self._client.pubsub(ignore_subscribe_messages=True) as pubsub:
            pubsub.psubscribe(keys.EVENTS_PATTERN)
            while not self._closing.is_set():
                message = pubsub.get_message(timeout=0.25)
                if message is not None:
                    self._dispatch(message["channel"], message["data"])

    def _dispatch(self, channel: bytes, event: bytes) -> None:
        with self._lock:
            watches = list(self._watches.get(channel, ()))
        for watch in watches:
            watch.notify(event)
