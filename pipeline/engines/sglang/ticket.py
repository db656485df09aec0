"""Ticket: one request inside SGLang, what both roles share: how it ends.

SGLang holds nothing of a request once its output stream has ended; `close` aborts and waits for exactly that. A
request that has not been handed to SGLang yet ends without it.
"""

from __future__ import annotations

from typing import Any, Protocol

from pipeline.engines.sglang.link import Link
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.ticket import Ticket
from pipeline.errors import EngineError
from pipeline.request import Request


class Host(Protocol):
    """What a ticket needs of its engine. All return at once."""

    link: Link

    def abort(self, ticket: SglangTicket) -> None:
        """Have SGLang end the request; one that it has not got yet ends here."""
        ...

    def join(self, ticket: SglangTicket) -> None:
        """Hand SGLang another request, whose prompt it holds."""
        ...

    def moved(self) -> None:
        """A page was read or passed over, or a request has ended: a prompt that was held back may start."""
        ...


class SglangTicket(Ticket):
    """`room` is unique in its process."""

    def __init__(self, room: int, request: Request, host: Host) -> None:
        super().__init__(request)
        self.room = room
        # Of fixed width: SGLang aborts every request whose id begins with the given one.
        self.rid = f"crossfill-{room:016x}"
        self._host = host
        self._ended = False

    # The job's side.

    def close(self) -> None:
        """Wake every waiting call, drain running copies, abort; returns once SGLang holds nothing. Idempotent."""
        self._drain()
        if not self._finishing:
            self._host.abort(self)
        with self.changed:
            self.changed.wait_for(lambda: self._ended)

    @property
    def ended(self) -> bool:
        """SGLang holds nothing of it."""
        return self._ended

    @property
    def over(self) -> bool:
        """SGLang holds nothing of it, and no message about it is awaited: it may be forgotten."""
        return self._ended

    @property
    def kept_pages(self) -> int:
        """Pages that wait: to be read, or for decoding to begin."""
        raise NotImplementedError

    @property
    def _finishing(self) -> bool:
        """It ends by itself at once: an abort could only turn success into failure."""
        return False

    # The link's thread.

    def on_message(self, message: Message) -> None:
        if message.kind is Kind.FAILED:
            self.fail(EngineError(message.data.decode(errors="replace")))

    # SGLang's event loop.

    def on_output(self, token_ids: list[int], finished: str | None, meta: dict[str, Any]) -> None:
        """New token ids; `finished` is SGLang's word for why these are the last."""
        raise NotImplementedError

    def end(self) -> None:
        with self.changed:
            if not self.whole:
                self._error = self._error or EngineError(f"SGLang ended handoff {self.request.handoff_id} early")
            self._ended = True
            self.changed.notify_all()
        self._host.moved()

    @property
    def whole(self) -> bool:
        """It has done what was asked of it: its end is no error."""
        raise NotImplementedError
