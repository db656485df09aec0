"""PrefillRun: one prompt whose pages leave the engine, in the order in which they become ready."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.engines.reference.model import KvCache
from pipeline.engines.reference.run import Host, Run, require_logits
from pipeline.engines.reference.sampler import draw, report
from pipeline.engines.text import Text
from pipeline.errors import EngineError
from pipeline.logprob import TokenLogprob
from pipeline.page import PAGE_TOKENS, Page, page_count, page_tokens, require_finite
from pipeline.request import Request


class PrefillRun(Run):
    """Implements `engines.base.Prefill`. A page is held from ready until read or skipped; the last ends the run.

    `texts`: the samples, whose first tokens are drawn here should the request want that.
    """

    def __init__(self, host: Host, request: Request, texts: Sequence[Text]) -> None:
        super().__init__(host, request, request.transfer_tokens)
        self._texts = texts
        self._first_tokens: tuple[int, ...] = ()
        self._first_logprobs: tuple[TokenLogprob, ...] = ()
        self._unread = set(range(page_count(self.body_tokens)))
        self._last = len(self._unread)

    def wait_ready(self, index: int, timeout_s: float) -> bool:
        with self.host.condition:
            self.host.condition.wait_for(lambda: self.ended or index < self._ready_pages, timeout_s)
            self._require_unread(index)
            return index < self._ready_pages

    def read(self, index: int) -> Page:
        with self.host.condition:
            self.host.condition.wait_for(lambda: self.ended or index not in self._unread or index < self._ready_pages)
            self._require_unread(index)
        with self.using() as cache:
            page = cache.page(index, page_tokens(index, self.body_tokens))
        require_finite(page)
        self._pass({index})
        return page

    def skip_to(self, index: int) -> None:
        self._pass(set(range(index)))

    def wait_done(self, timeout_s: float) -> bool:
        with self.host.condition:
            self.host.condition.wait_for(lambda: self.ended or self._ready_pages == self._last, timeout_s)
            if self.error is not None:
                raise self.error
            return self._ready_pages == self._last

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return self._first_tokens

    @property
    def first_logprobs(self) -> tuple[TokenLogprob, ...]:
        return self._first_logprobs

    @property
    def done(self) -> bool:
        with self.host.condition:
            return self._ready_pages == self._last

    @property
    def waiting_pages(self) -> int:
        return sum(index < self._ready_pages for index in self._unread)

    def begin(self) -> None:
        super().begin()
        self._end_if_read()

    def _compute(self, chunk: Sequence[int], cache: KvCache) -> None:
        if not self.request.first_token or cache.tokens + len(chunk) < self.body_tokens:
            super()._compute(chunk, cache)
            return
        logits = self.host.model.logits(chunk, cache)
        require_logits(logits, self.request)
        drawn = [draw(logits, text) for text in self._texts]
        reports = [report(logits, token, self.request.sampling.logprobs) or () for token in drawn]
        self._first_tokens = tuple(drawn)
        self._first_logprobs = tuple(one for reported in reports for one in reported)
        with self.host.condition:
            self.host.tokens_sampled += len(drawn)

    @property
    def _ready_pages(self) -> int:
        return self._last if self.present_tokens == self.body_tokens else self.present_tokens // PAGE_TOKENS

    def _require_unread(self, index: int) -> None:
        if self.error is not None:
            raise self.error
        if not 0 <= index < self._last:
            raise EngineError(f"page {index} was asked for and the prompt has {self._last}")
        if index not in self._unread:
            raise EngineError(f"page {index} was read or skipped already: the engine no longer holds it")

    def _pass(self, indices: set[int]) -> None:
        with self.host.condition:
            self._unread -= indices
            self._end_if_read()
            self.host.condition.notify_all()

    def _end_if_read(self) -> None:
        if not self._unread and self._ready_pages == self._last:
            self.end()
