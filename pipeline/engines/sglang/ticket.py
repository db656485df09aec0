"""Ticket: one request inside SGLang, what both roles share: how it ends.

SGLang holds nothing of a request once its output stream has ended; `close` aborts and waits for exactly that. A
request that has not been handed to SGLang yet ends without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from pipeline.engines.sglang.link import Link
from pipeline.engines.sglang.message import Message
from pipeline.errors import CrossfillError, EngineError, HandoffCancelledError
from pipeline.request import Request


class Host(Protocol):
    """What a ticket needs of its engine. Both return at once."""

    link: Link

    def abort(self, ticket: Ticket) -> None:
        """Have SGLang end the request; one that it has not got yet ends here."""
        ...

    def moved(self) -> None:
        """A page was read or passed over, or a request has ended: a prompt that was held back may start."""
        ...


class Ticket:
    """`room` is unique in its process. Fields are guarded by `changed`."""

    def __init__(self, room: int, request: Request, host: Host) -> None:
        self.room = room
        self.rid = (
            f"crossfill-{room:016x}"  # fixed width: SGLang aborts every request whose id begins with the given one
        )
        self.request = request
        self.changed = threading.Condition()
        self._host = host
        self._copying = 0  # page copies running right now, on the threads of jobs
        self._closed = False
        self._ended = False
        self._error: CrossfillError | None = None

    # The job's side.

    def close(self) -> None:
        """Wake every waiting call, drain running copies, abort; returns once SGLang holds nothing. Idempotent."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._copying)
        if not self._finishing:
            self._host.abort(self)
        with self.changed:
            self.changed.wait_for(lambda: self._ended)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def ended(self) -> bool:
        """SGLang holds nothing of it."""
        return self._ended

    @property
    def kept_pages(self) -> int:
        """Pages that wait: to be read, or for decoding to begin."""
        raise NotImplementedError

    @property
    def _finishing(self) -> bool:
        """It ends by itself at once: an abort could only turn success into failure."""
        return False

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

    # The link's thread.

    def on_message(self, message: Message) -> None:
        raise NotImplementedError

    # SGLang's event loop.

    def on_output(self, token_ids: list[int], finished: str | None, meta: dict[str, Any]) -> None:
        """New token ids; `finished` is SGLang's word for why these are the last."""
        raise NotImplementedError

    def fail(self, error: CrossfillError) -> None:
        """Every waiting and later call raises `error`. The first stays."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            if not self._whole:
                self._error = self._error or EngineError(f"SGLang ended handoff {self.request.handoff_id} early")
            self._ended = True
            self.changed.notify_all()
        self._host.moved()

    @property
    def _whole(self) -> bool:
        """It has done what was asked of it: its end is no error."""
        raise NotImplementedError
