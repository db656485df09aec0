"""SglangPrefill: one prompt being computed. See `base.Prefill`.

SGLang says after every chunk which pages are there, and keeps its blocks until it is released: when every page that D
wants was copied out. It always computes the whole prompt; rows behind what is transferred are cut off here.
"""

from __future__ import annotations

from typing import Any

from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.ticket import Host, Ticket
from pipeline.errors import EngineError
from pipeline.page import PAGE_TOKENS, Page, page_count, page_tokens, require_finite
from pipeline.request import Request


class SglangPrefill(Ticket):
    def __init__(self, room: int, request: Request, host: Host) -> None:
        super().__init__(room, request, host)
        self.pages = page_count(request.transfer_tokens)
        self.computed_tokens = 0  # prompt tokens that ran through the model; known at the end
        self._ready = 0
        self._next = 0  # pages before this one were read or skipped
        self._read: set[int] = set()  # read ahead of `_next`
        self._first_token: int | None = None
        self._released = False

    def wait_ready(self, index: int, timeout_s: float) -> bool:
        self._require_page(index)
        with self.changed:
            return self._wait(lambda: index < self._ready, timeout_s)

    def read(self, index: int) -> Page:
        """A page that was read or skipped is gone: EngineError."""
        self._require_page(index)
        with self.changed:
            self._wait(lambda: index < self._ready)
            if index < self._next or index in self._read:
                raise EngineError(f"page {index} was read or skipped already")
            self._copying += 1
        try:
            page = self._copy(index)
        finally:
            self._end_copy()
        with self.changed:
            self._read.add(index)
        self.skip_to(0)
        return page

    def skip_to(self, index: int) -> None:
        with self.changed:
            self._next = max(self._next, min(index, self.pages))
            while self._next in self._read:
                self._next += 1
            self._read = {ahead for ahead in self._read if ahead > self._next}
        self._release()
        self._host.moved()

    def wait_done(self, timeout_s: float) -> bool:
        with self.changed:
            return self._wait(lambda: self.done, timeout_s)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        wanted = self.request.first_token and self._first_token is not None
        return (self._first_token,) if wanted and self._first_token is not None else ()

    @property
    def done(self) -> bool:
        return self._first_token is not None

    @property
    def kept_pages(self) -> int:
        """Pages that are still to be read: what the quota counts."""
        return self.pages - self._next - len(self._read)

    @property
    def _finishing(self) -> bool:
        return self._released

    @property
    def _whole(self) -> bool:
        return self._released or self._closed

    def _require_page(self, index: int) -> None:
        if not 0 <= index < self.pages:
            raise EngineError(f"there is no page {index}: the prompt has {self.pages} pages to transfer")

    def _copy(self, index: int) -> Page:
        data = self._host.link.copy_out(self.room, index)
        if data is None:
            self._require_alive()
            raise EngineError(f"SGLang no longer holds page {index} of handoff {self.request.handoff_id}")
        tokens = page_tokens(index, self.request.transfer_tokens)
        if tokens < PAGE_TOKENS:
            data[..., tokens:, :] = 0  # what was in the block before, and the last token where D computes that itself
        page = Page(index, tokens, data)
        require_finite(page)
        return page

    def _release(self) -> None:
        """Let SGLang have its blocks back, once nothing more will be read. Not before the end of the compute: what it
        is told is "transferred"."""
        with self.changed:
            if self._released or self._closed or self._first_token is None or self.kept_pages:
                return
            self._released = True
        self._host.link.say(Message(Kind.RELEASE, self.room))

    def on_message(self, message: Message) -> None:
        with self.changed:
            if message.kind is Kind.READY:
                self._ready = min(message.page, self.pages)
            elif message.kind is Kind.FIRST:
                self._first_token = message.value
            self.changed.notify_all()
        self._release()

    def on_output(self, token_ids: list[int], finished: str | None, meta: dict[str, Any]) -> None:
        if finished is not None and self._released:
            self.computed_tokens = len(self.request.token_ids) - int(meta.get("cached_tokens", 0))
