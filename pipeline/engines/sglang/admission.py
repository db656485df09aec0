"""SglangAdmission: room for one prompt in SGLang's KV pool and the decoding that follows. See `base.Admission`.

SGLang's decode mode computes no prompt token: it wants the KV of all of them and P's first token, and goes on from
there. That token is handed out here, at once; what SGLang sends begins with it and is cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.base import FinishReason, TokenStep
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.ticket import Host, SglangTicket
from pipeline.engines.ticket import require_next
from pipeline.errors import EngineError
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, page_count, require_finite
from pipeline.request import Request


class SglangAdmission(SglangTicket):
    """`limit`: its max_tokens, or less where the context window ends before."""

    def __init__(self, room: int, request: Request, host: Host, limit: int) -> None:
        super().__init__(room, request, host)
        self.pages = page_count(request.transfer_tokens)
        self.tokens_sampled = 0  # by this engine: all but the first
        self._limit = limit
        self._admitted = False
        self._held = 0
        self._next = 0  # the page to import next
        self._written = 0  # pages before this one are in the pool
        self._staged: NDArray[np.float16] | None = None  # pages of the copy that is being collected
        self._decoding = False
        self._left = 0  # tokens of SGLang's that are still to be cut: the first
        self._emitted = 0
        self._finish: FinishReason | None = None
        self._steps: deque[TokenStep] = deque()
        self._kept: list[Page] | None = None  # copies of what was imported

    # The job's side.

    def wait_admitted(self, timeout_s: float) -> bool:
        with self.changed:
            return self._wait(lambda: self._admitted, timeout_s)

    @property
    def held_pages(self) -> int:
        return self._held

    @property
    def kept_pages(self) -> int:
        return 0 if self._decoding else self._next

    def import_page(self, page: Page) -> None:
        """NaN or Inf is refused: left in a block it would ruin whoever gets that block next."""
        require_finite(page)
        with self.changed:
            self._require_alive()
            self._require_next(page)
            self._copying += 1
        try:
            self._stage(page)
            with self.changed:
                self._next = page.index + 1
                if self._kept is not None:
                    self._kept.append(Page(page.index, page.tokens, page.data.copy()))
        finally:
            self._end_copy()

    def _stage(self, page: Page) -> None:
        """Collect the page, and copy what was collected when it is a full run of the ring or the prompt complete."""
        link = self._host.link
        if self._staged is None:
            self._staged = np.empty((min(link.batch, self.pages - page.index), *link.shape.array), np.float16)
        begin = self._written
        self._staged[page.index - begin] = page.data
        if page.index + 1 < begin + len(self._staged):
            return
        pages, self._staged, self._written = self._staged, None, page.index + 1
        if not link.copy_in(self.room, begin, pages):
            self._require_alive()
            raise EngineError(f"SGLang refuses page {page.index}: it has ended handoff {self.request.handoff_id}")

    def keep_pages(self) -> None:
        """From here on copies are kept here: SGLang frees a request's blocks by itself, and its plug-in cannot wait."""
        with self.changed:
            if self._kept is None and self._next == self._held:
                self._kept = []

    def export_pages(self) -> Iterator[Page]:
        with self.changed:
            if self._closed:
                self._require_alive()
            if self._kept is None or self._held:
                raise EngineError(
                    f"SGLang gives out pages that were imported after `keep_pages` only: it held {self._held} itself"
                )
            return iter([Page(page.index, page.tokens, page.data.copy()) for page in self._kept])

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        if len(first_tokens) != 1:
            raise EngineError(f"SGLang goes on from one first token, {len(first_tokens)} came")
        with self.changed:
            self._require_alive()
            if self._decoding:
                raise EngineError("decode was called twice for one admission")
            if self._next < self.pages:
                raise EngineError(f"page {self._next} of {self.pages} was not imported: nothing to decode from")
            self._decoding = True
            self._left = 1
            self._emit(first_tokens)
        self._host.link.say(Message(Kind.COMMIT, self.room, value=first_tokens[0]))
        if self._finish == "stop":
            self._host.abort(self)
        return self._take_steps()

    def _take_steps(self) -> Iterator[TokenStep]:
        finish = None
        while finish is None:
            with self.changed:
                # A step that has come is handed out even if SGLang failed behind it, but not after a close.
                self.changed.wait_for(lambda: self._steps or self._closed or self._error is not None)
                if self._closed or not self._steps:
                    self._require_alive()
                step = self._steps.popleft()
            finish = step.finish
            yield step

    def _require_next(self, page: Page) -> None:
        require_next(page, self._next, self.pages, self.request)
        if page.data.shape != self._host.link.shape.array:
            raise EngineError(f"page {page.index} is {page.data.shape}, not {self._host.link.shape.array}")

    # The link's thread.

    def on_message(self, message: Message) -> None:
        if message.kind is Kind.ADMITTED:
            with self.changed:
                self._admitted = True
                self._held = self._next = self._written = message.page
                self.changed.notify_all()

    # SGLang's event loop.

    def on_output(self, token_ids: list[int], finished: str | None, meta: dict[str, Any]) -> None:
        with self.changed:
            skipped = min(self._left, len(token_ids))
            self._left -= skipped
            fresh = token_ids[skipped:]
            self.tokens_sampled += len(fresh)
            if fresh and self._finish is None:
                self._emit(fresh)
            stopped = self._finish == "stop" and finished is None
            self.changed.notify_all()
        if stopped:
            self._host.abort(self)

    def _emit(self, token_ids: Sequence[int]) -> None:
        """Under `changed`. Stop ids are ours to see: SGLang was told to ignore them, as it would add its own."""
        stops = self.request.sampling.stop_token_ids
        ends = next((at for at, token in enumerate(token_ids, 1) if token in stops), None)
        kept = tuple(token_ids[:ends])
        self._emitted += len(kept)
        if ends is not None:
            self._finish = "stop"
        elif self._emitted >= self._limit:
            self._finish = "length"
        self._steps.append(TokenStep(kept, self._finish))
        self.changed.notify_all()

    @property
    def _whole(self) -> bool:
        return self._finish is not None or self._closed
