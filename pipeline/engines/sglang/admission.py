"""SglangAdmission: room for one prompt in SGLang's KV pool and the decoding that follows. See `base.Admission`.

SGLang's decode mode computes no prompt token: it wants the KV of all of them and P's first token, and goes on from
there. Further samples are requests of their own. They join once the first one decodes, so that they hit its whole pages
in SGLang's prefix cache; the tail behind these, which no cache keeps, is written into each from a copy kept here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.base import TokenStep
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.sample import End, SglangSample
from pipeline.engines.sglang.ticket import Host
from pipeline.engines.ticket import require_next
from pipeline.errors import CrossfillError, EngineError
from pipeline.logprob import TokenLogprob
from pipeline.page import PAGE_TOKENS, Page, page_count, require_finite
from pipeline.request import Request


class Sibling(SglangSample):
    """A sample beside the first one, `lead`, whose lock and steps it shares."""

    def __init__(self, room: int, request: Request, host: Host, lead: SglangAdmission, index: int) -> None:
        super().__init__(room, request, host, lead.end_at, index)
        self.changed = lead.changed
        self.steps = lead.steps
        self.joined = False  # SGLang has it
        self.held: int | None = None  # pages it found in the prefix cache, once it is admitted
        self.committed = False

    @property
    def due(self) -> bool:
        """It may take its next step towards decoding."""
        return not self.done and (not self.joined or self.held is not None)

    @property
    def done(self) -> bool:
        """Nothing of it depends on the lead any more."""
        return self.committed or (self.finish is not None and not self.joined)

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        if message.kind is Kind.ADMITTED:
            with self.changed:
                self.held = message.page
                self.changed.notify_all()


class SglangAdmission(SglangSample):
    """`rooms` and `requests`: one for each sample, this being the first one's."""

    def __init__(self, rooms: Sequence[int], requests: Sequence[Request], host: Host, end: End) -> None:
        super().__init__(rooms[0], requests[0], host, end)
        self.pages = page_count(requests[0].transfer_tokens)
        self._siblings = [
            Sibling(room, request, host, self, index)
            for index, (room, request) in enumerate(zip(rooms[1:], requests[1:], strict=True), 1)
        ]
        self._admitted = False
        self._held = 0
        self._next = 0  # the page to import next
        self._written = 0  # pages before this one are in the pool
        self._staged: NDArray[np.float16] | None = None  # pages of the copy that is being collected
        self._tail: NDArray[np.float16] | None = None  # the siblings' copy of the last page, where it is not full
        self._decoding = False
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
            if self._siblings and page.tokens < PAGE_TOKENS:
                self._tail = page.data.copy()
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
        """Before the first import. From here on copies are kept here, those of held pages to begin with: SGLang frees a
        request's blocks by itself, and its plug-in cannot wait."""
        with self.changed:
            if self._closed or self._kept is not None or self._next > self._held:
                return
            self._copying += 1
        try:
            with suppress(EngineError):  # it has ended: that is for the next call to say
                self._kept = self._read_held()
        finally:
            self._end_copy()

    def _read_held(self) -> list[Page]:
        link = self._host.link
        found: list[Page] = []
        while len(found) < self._held:
            data = link.copy_out(self.room, len(found), min(link.batch, self._held - len(found)))
            if data is None:
                raise EngineError(f"SGLang no longer holds the pages of handoff {self.request.handoff_id}")
            found += [Page(index, PAGE_TOKENS, page) for index, page in enumerate(data, len(found))]
        return found

    def export_pages(self) -> Iterator[Page]:
        with self.changed:
            if self._closed:
                self._require_alive()
            if self._kept is None:
                raise EngineError("SGLang gives pages out only where `keep_pages` came before the first import")
            return iter([Page(page.index, page.tokens, page.data.copy()) for page in self._kept])

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        samples: list[SglangSample] = [self, *self._siblings]
        if len(first_tokens) != len(samples):
            raise EngineError(f"SGLang goes on from {len(samples)} first tokens, {len(first_tokens)} came")
        if self.request.sampling.logprobs is not None and len(first_logprobs) != len(samples):
            raise EngineError(f"{len(samples)} first tokens came with {len(first_logprobs)} logprobs")
        with self.changed:
            self._require_alive()
            if self._decoding:
                raise EngineError("decode was called twice for one admission")
            if self._next < self.pages:
                raise EngineError(f"page {self._next} of {self.pages} was not imported: nothing to decode from")
            self._decoding = True
            for sample, token in zip(samples, first_tokens, strict=True):
                sample.begin(token, first_logprobs[sample.index] if first_logprobs else None)
        self._host.link.say(Message(Kind.COMMIT, self.room, value=first_tokens[0]))
        self._end_early()
        return self._take_steps(len(samples))

    def _take_steps(self, running: int) -> Iterator[TokenStep]:
        while running:
            with self.changed:
                # A step that has come is handed out even if SGLang failed behind it, but not after a close.
                self.changed.wait_for(lambda: self.steps or self._closed or self._fault or self._due)
                if self._closed:
                    self._require_alive()
                sibling = None if self._fault else self._due
                if sibling is None and not self.steps and self._fault:
                    raise self._fault
                joins = sibling is not None and not sibling.joined
                if sibling is not None and joins:
                    sibling.joined = True
                step = self.steps.popleft() if sibling is None else None
            if sibling is not None:
                self._host.join(sibling) if joins else self._pass_on(sibling)
            elif step is not None:
                running -= step.finish is not None
                yield step

    def close(self) -> None:
        super().close()
        for sibling in self._siblings:
            if sibling.joined:
                sibling.close()

    @property
    def _due(self) -> Sibling | None:
        """The next sibling that can be helped on its way."""
        return next((sibling for sibling in self._siblings if sibling.due), None) if self.begun else None

    @property
    def _fault(self) -> CrossfillError | None:
        return self._error or next((sibling.error for sibling in self._siblings if sibling.error), None)

    @property
    def _may_end(self) -> bool:
        return all(sibling.done for sibling in self._siblings)

    @property
    def _runs_on(self) -> bool:
        return self.finish == "stop" or (self.finish is not None and bool(self._siblings))

    def _end_early(self) -> None:
        """While siblings look for its pages they must stay."""
        with self.changed:
            over = self._runs_on and self._may_end
        if over:
            self._host.abort(self)

    def _pass_on(self, sibling: Sibling) -> None:
        """Write what the prefix cache has not kept, and let the sibling decode."""
        missing = self.pages - (sibling.held or 0)
        if missing > (self._tail is not None):
            raise EngineError(f"SGLang no longer holds {missing} pages of the prompt that its other samples need")
        with self.changed:
            self._require_alive()
            self._copying += 1
        try:
            if missing and self._tail is not None:
                self._host.link.copy_in(sibling.room, self.pages - 1, self._tail[None])
        finally:
            self._end_copy()
        self._host.link.say(Message(Kind.COMMIT, sibling.room, value=sibling.first_token))
        with self.changed:
            sibling.committed = True
        self._end_early()

    def _require_next(self, page: Page) -> None:
        require_next(page, self._next, self.pages, self.request)
        if page.data.shape != self._host.link.shape.array:
            raise EngineError(f"page {page.index} is {page.data.shape}, not {self._host.link.shape.array}")

    # The link's thread.

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        if message.kind is Kind.ADMITTED:
            with self.changed:
                self._admitted = True
                self._held = self._next = self._written = message.page
                self.changed.notify_all()
