"""SglangPrefill: one prompt being computed. See `base.Prefill`.

SGLang says after every chunk which pages are there, and keeps its blocks until it is released: when every page that D
wants was copied out. It always computes the whole prompt; rows behind what is transferred are cut off here.
"""

from __future__ import annotations

from typing import Any

from pipeline.engines.sglang import order
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.order import First
from pipeline.engines.sglang.ticket import Host, SglangTicket
from pipeline.engines.ticket import Unread
from pipeline.errors import EngineError
from pipeline.logprob import TokenLogprob
from pipeline.page import PAGE_TOKENS, Page, PageArray, page_count, page_tokens, require_finite
from pipeline.request import Request


class SglangPrefill(SglangTicket):
    def __init__(self, room: int, request: Request, host: Host) -> None:
        super().__init__(room, request, host)
        self.pages = page_count(request.transfer_tokens)
        self.computed_tokens = 0  # prompt tokens that ran through the model; known at the end
        self._ready = 0
        self._unread = Unread(self.pages)
        self._first: First | None = None
        self._released = False

    def wait_ready(self, index: int, timeout_s: float) -> bool:
        self._unread.require_page(index)
        with self.changed:
            return self._wait(lambda: index < self._ready, timeout_s)

    def read(self, index: int) -> Page:
        """A page that was read or skipped is gone: EngineError."""
        self._unread.require_page(index)
        page = self._page(index, self._source(index))
        with self.changed:
            self._unread.read(index)
        self.skip_to(0)
        return page

    def _source(self, index: int) -> PageArray | int:
        """The page, where an earlier copy took it along, else how many to copy; `_copy` must follow."""
        with self.changed:
            self._wait(lambda: index < self._ready)
            if (data := self._unread.take(index)) is not None:
                return data
            self._copying += 1
            return min(self._host.link.batch, self._ready - index)

    def skip_to(self, index: int) -> None:
        with self.changed:
            self._unread.skip_to(index)
        self._release()
        self._host.moved()

    def wait_done(self, timeout_s: float) -> bool:
        with self.changed:
            return self._wait(lambda: self.done, timeout_s)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return self._first.token_ids if self._first is not None and self.request.first_token else ()

    @property
    def first_logprobs(self) -> tuple[TokenLogprob, ...]:
        return self._first.logprobs if self._first is not None else ()

    @property
    def done(self) -> bool:
        return self._first is not None

    @property
    def kept_pages(self) -> int:
        """Pages that are still to be read: what the quota counts."""
        return self._unread.count

    @property
    def _finishing(self) -> bool:
        return self._released

    @property
    def whole(self) -> bool:
        return self._released or self._closed

    def _copy(self, index: int, count: int) -> PageArray:
        """Page `index`. The others of the copy are kept before it counts as ended."""
        try:
            pages = self._host.link.copy_out(self.room, index, count)
            if pages is None:
                self._require_alive()
                raise EngineError(f"SGLang no longer holds page {index} of handoff {self.request.handoff_id}")
            first, *others = pages
            with self.changed:
                self._unread.keep(index + 1, others)
        finally:
            self._end_copy()
        page: PageArray = first
        return page

    def _page(self, index: int, source: PageArray | int) -> Page:
        data = self._copy(index, source) if isinstance(source, int) else source
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
            if self._released or self._closed or self._first is None or self.kept_pages:
                return
            self._released = True
        self._host.link.say(Message(Kind.RELEASE, self.room))

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        with self.changed:
            if message.kind is Kind.READY:
                self._ready = min(message.page, self.pages)
            elif message.kind is Kind.FIRST:
                given = message.data
                self._first = order.unpack(given, self.request.sampling) if given else First((message.value,))
            self.changed.notify_all()
        self._release()

    def on_output(self, token_ids: list[int], finished: str | None, meta: dict[str, Any]) -> None:
        if finished is not None and self._released:
            self.computed_tokens = len(self.request.token_ids) - int(meta.get("cached_tokens", 0))
