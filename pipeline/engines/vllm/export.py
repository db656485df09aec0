"""Export: one prompt being computed, the `Prefill` of the vLLM engine.

The engine step only marks pages ready; `read` copies out of vLLM's blocks on the job's thread, and takes the pages that
became ready in the same step along. A page is copied only while it is marked, and `withdraw` (a preemption) waits for
copies already running, never for a reader to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.engines.text import Text
from pipeline.engines.ticket import Unread
from pipeline.engines.vllm.copier import Copier, Fence
from pipeline.engines.vllm.exchange import Exchange, VllmTicket
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, PageArray, page_count, page_tokens, require_finite
from pipeline.request import Request


class Mark(NamedTuple):
    """Pages [0, ready) are complete once `fence` has passed."""

    ready: int
    fence: Fence


class Batch(NamedTuple):
    """Pages to copy with one call: a page and those behind it that the same step completed."""

    copier: Copier
    blocks: list[int]
    after: Fence


class Export(VllmTicket):
    def __init__(self, key: str, request: Request, exchange: Exchange, texts: Sequence[Text] = ()) -> None:
        """`texts`: the samples whose first tokens are drawn here, none where D draws them."""
        super().__init__(key, request, exchange, texts)
        self._drawn: tuple[tuple[int, ...], tuple[TokenLogprob, ...]] = ((), ())
        self.pages = page_count(request.transfer_tokens)
        self._marks: list[Mark] = []  # growing; pages are in `_blocks`
        self._blocks: list[int] = []
        self._unread = Unread(self.pages)
        self._computed: Fence | None = None  # set with the step that ends the prompt
        self._first_tokens: tuple[int, ...] = ()
        self._first_logprobs: tuple[TokenLogprob, ...] = ()

    # --- the job's side

    def wait_ready(self, index: int, timeout_s: float) -> bool:
        self._unread.require_page(index)
        with self.changed:
            return self._wait(lambda: index < self._ready, timeout_s)

    def read(self, index: int) -> Page:
        """A page that was read or skipped is gone: EngineError."""
        self._unread.require_page(index)
        source = self._source(index)
        data = self._copy(index, source) if isinstance(source, Batch) else source
        page = Page(index, page_tokens(index, self.request.transfer_tokens), data)
        data[:, :, :, page.tokens :] = 0
        require_finite(page)
        with self.changed:
            self._unread.read(index)
        self.skip_to(0)
        return page

    def _source(self, index: int) -> PageArray | Batch:
        """The page, when an earlier copy took it along, else what to copy; `_copy` must follow."""
        with self.changed:
            self._wait(lambda: index < self._ready)
            if (data := self._unread.take(index)) is not None:
                return data
            # The step that completed the page, not the last one: that may still run.
            mark = next(mark for mark in self._marks if index < mark.ready)
            copier = self._begin_copy()
            return Batch(copier, self._blocks[index : min(index + copier.batch, mark.ready)], mark.fence)

    def _copy(self, index: int, batch: Batch) -> PageArray:
        """Page `index`. The batch's other pages are kept before the copy counts as ended."""
        try:
            first, *others = batch.copier.read(batch.blocks, batch.after)
            with self.changed:
                self._unread.keep(index + 1, others)
        finally:
            self._end_copy()
        page: PageArray = first
        return page

    def skip_to(self, index: int) -> None:
        with self.changed:
            self._unread.skip_to(index)
        self._exchange.wake()  # blocks to free, or room for a prompt that was held back

    def wait_done(self, timeout_s: float) -> bool:
        with self.changed:
            if not self._wait(lambda: self._computed is not None and self._has_token, timeout_s):
                return False
            computed = self._computed
        assert computed is not None
        computed.wait()  # what is left of one step
        return True

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return self._first_tokens

    @property
    def first_logprobs(self) -> tuple[TokenLogprob, ...]:
        return self._first_logprobs

    @property
    def done(self) -> bool:
        """The token arrives a little after the last page: vLLM hands it out when the step is over."""
        return self._computed is not None and self._computed.passed and self._has_token

    @property
    def _has_token(self) -> bool:
        return len(self._first_tokens) == len(self.texts)

    @property
    def _ready(self) -> int:
        return self._marks[-1].ready if self._marks else 0

    # --- the engine thread's side

    @property
    def held_pages(self) -> int:
        """Pages that are still to be read: what the quota counts."""
        return self._unread.count

    @property
    def released(self) -> bool:
        """No copy runs and none will ever begin: vLLM may reuse the blocks.

        Lock-free: `_closed` and the first unread page only grow, and no copy begins after either has reached its end.
        """
        return (self._closed or self._unread.first >= self.pages) and not self._copying

    def publish(self, ready: int, blocks: Sequence[int], fence: Fence, *, done: bool = False) -> None:
        """Pages [0, ready) are complete in these blocks once `fence` has passed; `done`: so is the prompt."""
        with self.changed:
            if self._ready < (ready := min(ready, self.pages)):
                self._marks.append(Mark(ready, fence))
            self._blocks = list(blocks[: self.pages])
            if done and self._computed is None:
                self._computed = fence
            self.changed.notify_all()

    def draw(self, first_tokens: tuple[int, ...], first_logprobs: tuple[TokenLogprob, ...]) -> None:
        """From the step that runs; `deliver` says that it was the one that ended the prompt."""
        self._drawn = (first_tokens, first_logprobs)

    def deliver(self) -> None:
        with self.changed:
            self._first_tokens, self._first_logprobs = self._drawn
            self.changed.notify_all()

    def withdraw(self) -> None:
        """A preemption took the blocks: unread pages wait until they are computed again."""
        with self.changed:
            self._marks = []
            self._blocks = []
            self.changed.wait_for(lambda: not self._copying)
            self._unread.drop()
