"""Export: one prompt being computed, the `Prefill` of the vLLM engine.

The engine step only marks pages ready; `read` copies out of vLLM's blocks on the job's thread. A page is copied only
while it is marked, and `withdraw` (a preemption) waits for copies already running, never for a reader to come.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.engines.vllm.exchange import Exchange, Ticket
from pipeline.errors import EngineError
from pipeline.page import Page, page_count, page_tokens, require_finite
from pipeline.request import Request


class Export(Ticket):
    def __init__(self, key: str, request: Request, exchange: Exchange) -> None:
        super().__init__(key, request, exchange)
        self.pages = page_count(request.transfer_tokens)
        self._ready = 0  # pages [0, ready) are complete in `_blocks`
        self._blocks: list[int] = []
        self._next = 0  # pages before this one were read or skipped
        self._read: set[int] = set()  # read ahead of `_next`
        self._computed = False
        self._first_tokens: tuple[int, ...] = ()

    # --- the job's side

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
            block, pages = self._blocks[index], self._begin_copy()
        tokens = page_tokens(index, self.request.transfer_tokens)
        try:
            page = Page(index, tokens, pages.read(block, tokens))
        finally:
            self._end_copy()
        require_finite(page)
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
        self._exchange.wake()  # blocks to free, or room for a prompt that was held back

    def wait_done(self, timeout_s: float) -> bool:
        with self.changed:
            return self._wait(lambda: self.done, timeout_s)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return self._first_tokens

    @property
    def done(self) -> bool:
        """The token arrives a little after the last page: vLLM hands it out when the step is over."""
        return self._computed and len(self._first_tokens) == self.request.first_token

    def _require_page(self, index: int) -> None:
        if not 0 <= index < self.pages:
            raise EngineError(f"there is no page {index}: the prompt has {self.pages} pages to transfer")

    # --- the engine thread's side

    @property
    def held_pages(self) -> int:
        """Pages that are still to be read: what the quota counts."""
        return self.pages - self._next - len(self._read)

    @property
    def released(self) -> bool:
        """No copy runs and none will ever begin: vLLM may reuse the blocks.

        Lock-free: `_closed` and `_next` only grow, and no copy begins after either has reached its end.
        """
        return (self._closed or self._next >= self.pages) and not self._copying

    def publish(self, ready: int, blocks: Sequence[int], *, done: bool = False) -> None:
        """Pages [0, ready) are complete in these blocks."""
        with self.changed:
            self._ready = max(self._ready, min(ready, self.pages))
            self._blocks = list(blocks[: self.pages])
            self._computed = self._computed or done
            self.changed.notify_all()

    def deliver(self, first_tokens: tuple[int, ...]) -> None:
        with self.changed:
            self._first_tokens = first_tokens
            self.changed.notify_all()

    def withdraw(self) -> None:
        """A preemption took the blocks: unread pages wait until they are computed again."""
        with self.changed:
            self._ready = 0
            self._blocks = []
            self.changed.wait_for(lambda: not self._copying)
