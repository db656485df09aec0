"""DecodeRun: one prompt whose pages come in from outside, or are computed here, and the tokens that follow it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.base import TokenStep
from pipeline.engines.reference.model import KvCache
from pipeline.engines.reference.run import Host, Run, require_logits
from pipeline.engines.reference.sampler import draw, report
from pipeline.engines.text import Text
from pipeline.errors import EngineError, HandoffCancelledError
from pipeline.logprob import TokenLogprob
from pipeline.page import PAGE_TOKENS, Page, page_count, page_tokens
from pipeline.request import Request


@dataclass(slots=True)
class _Sample:
    """One of the texts that are being drawn. `cache` holds all its tokens but the last."""

    index: int
    text: Text
    cache: KvCache
    last: int


class DecodeRun(Run):
    """Implements `engines.base.Admission`. `limit`: tokens that may be sampled, of each of `texts`."""

    def __init__(self, host: Host, request: Request, texts: Sequence[Text], *, local: bool, limit: int) -> None:
        super().__init__(host, request, len(request.token_ids) + limit, seats=len(texts))
        self._texts = texts
        self._samples: list[_Sample] = []  # that go on; empty until the prompt is whole
        self._local = local
        self._held_pages = 0
        self._joined = False
        self._closed = False
        self._kept: KvCache | None = None  # behind the last step
        self._keep = False
        self._steps: deque[TokenStep] = deque()

    @property
    def held_pages(self) -> int:
        return self._held_pages

    @property
    def waiting_pages(self) -> int:
        return 0 if self._joined else page_count(self.present_tokens)

    @property
    def wants_chunk(self) -> bool:
        return self._joined and super().wants_chunk

    @property
    def wants_token(self) -> bool:
        return self._joined and not self.ended and self.present_tokens >= self.body_tokens

    def begin(self) -> None:
        super().begin()
        self._held_pages = self.present_tokens // PAGE_TOKENS

    def import_page(self, page: Page) -> None:
        with self.using() as cache:
            self._require_next(page)
            cache.append_page(page.data, page.tokens)
            with self.host.condition:
                self.present_tokens = cache.tokens

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        """`first_tokens` are not used: this engine computes the last prompt token and samples all tokens itself."""
        with self.using() as cache:
            self._require_whole()
            # Only now: what is stored is found by others, so it must be committed.
            self.store_pages(cache, self.tokens)
            with self.host.condition:
                self._joined = True
        return self._emit()

    def keep_pages(self) -> None:
        self._keep = True

    def export_pages(self) -> Iterator[Page]:
        if self._kept is not None:
            return self._pages(self._kept)
        with self.using() as cache:  # rows of the prompt do not change any more: the engine may go on behind them
            return self._pages(cache)

    def close(self) -> None:
        with self.host.condition:
            self._closed = True
            self._kept = None
        super().close()

    def step(self) -> None:
        """The next chunk of a prompt computed here, else the next token of every sample."""
        if self.wants_chunk:
            super().step()
            return
        with self.using() as cache:
            for step in self._first_steps(cache) if not self._samples else self._next_steps():
                self._push(step, cache)

    def _pages(self, cache: KvCache) -> Iterator[Page]:
        """Copied now, not when they are asked for."""
        body = min(self.present_tokens, self.body_tokens)
        whole = range(page_count(body) if body == self.body_tokens else body // PAGE_TOKENS)
        return iter([cache.page(index, page_tokens(index, body)) for index in whole])

    def _first_steps(self, cache: KvCache) -> Iterator[TokenStep]:
        """The prompt's last token is computed once for all samples; each goes on from a copy of the cache."""
        logits = self.host.model.logits(self.tokens[-1:], cache)
        with self.host.condition:
            self.host.prompt_tokens_computed += 1
        caches = [cache, *(cache.copy() for _ in self._texts[1:])]
        self._samples = [
            _Sample(i, text, own, 0) for i, (text, own) in enumerate(zip(self._texts, caches, strict=True))
        ]
        for sample in list(self._samples):
            yield self._drawn(sample, logits)

    def _next_steps(self) -> Iterator[TokenStep]:
        for sample in list(self._samples):
            yield self._drawn(sample, self.host.model.logits([sample.last], sample.cache))

    def _drawn(self, sample: _Sample, logits: NDArray[np.float32]) -> TokenStep:
        require_logits(logits, self.request)
        sample.last = draw(logits, sample.text)
        finish = sample.text.push(sample.last)
        if finish:
            self._samples.remove(sample)
            if sample.index == 0:
                self.store_pages(sample.cache, [*self.tokens, *sample.text.tokens])
        logprobs = report(logits, sample.last, self.request.sampling.logprobs)
        return TokenStep((sample.last,), finish, sample.index, logprobs)

    def _push(self, step: TokenStep, cache: KvCache) -> None:
        with self.host.condition:
            self._kept = cache if self._keep and not self._closed else None
            self.host.tokens_sampled += 1
            self._steps.append(step)
            if not self._samples:
                self.ended = True  # `using` gives everything back when it is left
            self.host.condition.notify_all()

    def _emit(self) -> Iterator[TokenStep]:
        running = len(self._texts)
        while running:
            with self.host.condition:
                self.host.condition.wait_for(lambda: self.ended or self._steps)
                if self._closed:
                    raise HandoffCancelledError(f"handoff {self.request.handoff_id} was closed")
                if not self._steps:
                    self.require_live()
                step = self._steps.popleft()
            running -= step.finish is not None
            yield step

    def _require_next(self, page: Page) -> None:
        if self._local or self._joined:
            raise EngineError("a page was imported into a request that is computed here, or decodes already")
        index = page_count(self.present_tokens)
        tokens = page_tokens(index, self.body_tokens)
        if tokens <= 0 or (page.index, page.tokens) != (index, tokens):
            raise EngineError(
                f"page {page.index} with {page.tokens} tokens was imported where page {index} of "
                f"{page_count(self.body_tokens)} with {max(tokens, 0)} tokens must follow"
            )
        if page.data.shape != self.host.model.shape.array or page.data.dtype != np.float16:
            raise EngineError(
                f"page {page.index} is {page.data.dtype} {page.data.shape}, not float16 {self.host.model.shape.array}"
            )

    def _require_whole(self) -> None:
        if self._joined:
            raise EngineError("decode was called twice for one admission")
        if not self._local and self.present_tokens < self.body_tokens:
            raise EngineError(
                f"decode was called with {page_count(self.present_tokens)} of {page_count(self.body_tokens)} pages"
            )
