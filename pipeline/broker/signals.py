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
from pipeline.broker.ledger import Ledger
from pipeline.broker.record import Role, Snapshot
from pipeline.errors import BrokerError, DeadlineError, HandoffCancelledError, StaleAttemptError
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
        self._snapshot: Snapshot | None = None
        self._part: tuple[Role, int] | None = None
        self._stale = False
        self.abandoned = False

    def belong(self, role: Role, attempt: int) -> None:
        """This thread's part: it is over as well when another attempt of `role` has replaced it."""
        self._part = role, attempt

    @property
    def snapshot(self) -> Snapshot | None:
        """What was seen last; None before the first look, and when the record is gone."""
        return self._snapshot

    @property
    def stopped(self) -> bool:
        """The handoff is over because the API saw a stop string: a finish, unless it is that of whoever replaced us."""
        return self._snapshot is not None and self._snapshot.state is State.FINISHED and not self._stale

    @property
    def due(self) -> bool:
        """It is time to look again."""
        return time.monotonic() - self._looked >= _HEAL_S

    def abandon(self) -> None:
        """This process is to end: its part is over as if the handoff were, which another replica goes on with."""
        self.abandoned = True
        self._over.set()
        self._changed.set()

    def on_over(self, close: Callable[[], None]) -> None:
        """Call `close`, from another thread, as soon as the handoff is cancelled, has ended or was taken over."""
        with self._lock:
            self._closers.append(close)

    def check(self) -> None:
        """Raise HandoffCancelledError when there is nothing left to work for, StaleAttemptError when another one
        does it. Cheap; call it often."""
        if not self._over.is_set() and self.due:
            self.look()
        if self._stale:
            raise StaleAttemptError(f"handoff {self._id} is in the hands of a newer attempt")
        if self._over.is_set():
            raise HandoffCancelledError(f"handoff {self._id} is over")

    def wait_for(self, find: Callable[[Snapshot], T | None], timeout_s: float, what: str) -> T:
        """Block until `find` sees in the record what it looks for. Raises DeadlineError, HandoffCancelledError."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._changed.clear()
            snapshot = self.look()
            self.check()
            assert snapshot is not None
            if (found := find(snapshot)) is not None:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"waited {timeout_s:g} s for {what}")
            self._changed.wait(min(left, _HEAL_S))

    def look(self) -> Snapshot | None:
        """Read the ledger now."""
        self._looked = time.monotonic()
        seen = self._snapshot = self._ledger.peek(self._id)
        if seen is not None and self._part is not None and seen.attempt(self._part[0]) != self._part[1]:
            self._stale = True
        if seen is None or seen.state in _ENDING or self._stale:
            self._over.set()
            self._changed.set()
        return seen

    def notify(self) -> None:
        """Something happened: wake the waiter, and let the next check look."""
        self._looked = float("-inf")
        self._changed.set()

    def heal(self) -> None:
        """Look, if it is time; once it is over, close what is to be closed, on a thread of its own: that drains."""
        if self.due:
            self.look()
        with self._lock:
            closers, self._closers = (self._closers, []) if self._over.is_set() else ([], self._closers)
        for close in closers:
            threading.Thread(target=close, name=f"close-{self._id[:8]}", daemon=True).start()


class Signals:
    """The process's subscription. `watch` is used by job threads; `close` ends both threads of this."""

    def __init__(self, client: Redis, ledger: Ledger) -> None:
        self._client = client
        self._ledger = ledger
        self._watches: dict[bytes, list[Watch]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"signals-{name}", daemon=True)
            for name, target in (("listen", self._pump), ("heal", self._heal))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        self._woken.set()
        for thread in self._threads:
            thread.join()

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

    def seen(self, handoff_id: str) -> Snapshot | None:
        """What was last read of a handoff that this process works on; None of any other."""
        with self._lock:
            watches = self._watches.get(keys.HandoffKeys(handoff_id).events.encode(), ())
            return next((watch.snapshot for watch in watches if watch.snapshot is not None), None)

    def abandon(self) -> None:
        """Let every part that this process still has in a handoff end."""
        with self._lock:
            watches = [watch for several in self._watches.values() for watch in several]
        for watch in watches:
            watch.abandon()
        self._woken.set()

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
            except Exception:  # without this thread nobody here hears of an end
                _log.exception("signals; subscribing again")
                self._closing.wait(_HEAL_S)

    def _listen(self) -> None:
        with self._client.pubsub(ignore_subscribe_messages=True) as pubsub:
            pubsub.psubscribe(keys.EVENTS_PATTERN)
            while not self._closing.is_set():
                message = pubsub.get_message(timeout=0.25)
                if message is not None:
                    self._dispatch(message["channel"])

    def _dispatch(self, channel: bytes) -> None:
        with self._lock:
            watches = list(self._watches.get(channel, ()))
        for watch in watches:
            watch.notify()
        if watches:
            self._woken.set()

    def _heal(self) -> None:
        """What a notification said, or would have said had it not been lost."""
        while not self._closing.is_set():
            self._woken.wait(_HEAL_S)
            self._woken.clear()
            with self._lock:
                watches = [watch for several in self._watches.values() for watch in several]
            for watch in watches:
                self._heal_one(watch)

    @staticmethod
    def _heal_one(watch: Watch) -> None:
        """It is looked at again: nothing ends the thread that all of them wait for."""
        try:
            watch.heal()
        except BrokerError:
            pass  # the heartbeat says so
        except Exception:
            _log.exception("a watch was not healed")
