"""Intake: room for one prompt in vLLM's block pool and the decoding that follows, the `Admission` of the vLLM engine.

A request whose prompt is not held waits in vLLM as an asynchronous load: it occupies blocks but no place in the batch.
Jobs write pages into those blocks, a batch at a time, the last batch with the last page; `decode` reports the load as
received. Closing before that aborts the request first and only then reports the load, so that vLLM frees the blocks
without ever hashing them into its prefix cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pipeline.engines.base import TokenStep
from pipeline.engines.pace import handed_on
from pipeline.engines.text import Text
from pipeline.engines.ticket import require_next
from pipeline.engines.vllm.copier import Copier, Fence
from pipeline.engines.vllm.exchange import Exchange, VllmTicket
from pipeline.errors import CrossfillError, EngineError
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, PageArray, page_count, page_tokens, require_finite
from pipeline.request import Request

_PROMPT_S = 10.0  # how long an export waits for the step that tells where the pages are


class Prompt(NamedTuple):
    """The blocks of all pages, complete once `fence` has passed."""

    blocks: list[int]
    fence: Fence


class Intake(VllmTicket):
    def __init__(self, key: str, request: Request, exchange: Exchange, texts: Sequence[Text], *, local: bool) -> None:
        """`texts`: one for each sample; the first is drawn here, the others by `siblings`."""
        super().__init__(key, request, exchange, texts[:1])
        self.siblings = [Sibling(self, sample, text) for sample, text in enumerate(texts) if sample]
        self.joined = False  # the siblings are in vLLM; engine thread
        self.pages = page_count(request.transfer_tokens)
        self.local = local
        self.loading: str | None = None  # vLLM's id of the request from the allocation until the load was reported
        self._admitted = False
        self._held = 0
        self._next = 0  # the page to import next; == pages when nothing is missing
        self._blocks: list[int] = []
        self._after = Fence()  # the blocks are ours once it has passed
        self._staged: torch.Tensor | None = None  # pages of the batch that is being collected
        self._written = 0  # pages before this one are in their blocks
        self._received = False
        self._keeping = False
        self._prompt: Prompt | None = None  # where the whole prompt is, once it is computed
        self._steps: list[TokenStep] = []  # since the job's thread took the last ones
        self._last = threading.Event()  # there is a sample's last step, or no other will come

    # --- the job's side

    def wait_admitted(self, timeout_s: float) -> bool:
        with self.changed:
            return self._wait(lambda: self._admitted, timeout_s)

    @property
    def held_pages(self) -> int:
        return self._held

    def import_page(self, page: Page) -> None:
        """NaN or Inf is refused: left in a block it would ruin whoever gets that block next."""
        require_finite(page)
        with self.changed:
            self._require_alive()
            require_next(page, self._next, self.pages, self.request)
            copier = self._begin_copy()
        try:
            self._stage(page, copier)
            self._next = page.index + 1
        finally:
            self._end_copy()

    def _stage(self, page: Page, copier: Copier) -> None:
        """Collect the page, and write the batch when it is full or the prompt complete."""
        if self._staged is None:
            self._staged = copier.host(min(copier.batch, self.pages - page.index))
        begin, end = self._written, page.index + 1
        self._staged.numpy()[page.index - begin] = page.data
        if end - begin == len(self._staged):
            copier.write(self._blocks[begin:end], self._staged, self._after)
            self._staged, self._written = None, end

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        """`first_tokens` must be empty: vLLM computes the last prompt token and samples every token itself."""
        if first_tokens:
            raise EngineError("vLLM samples the first token itself and takes none from outside")
        with self.changed:
            self._require_alive()
            if self._next < self.pages:
                raise EngineError(f"page {self._next} of {self.pages} was not imported: nothing to decode from")
            if self.loading is not None and not self._received:
                self._received = True
                self._exchange.receive(self.loading)
        return self._take_steps()

    def keep_pages(self) -> None:
        with self.changed:
            self._keeping = True
        self._exchange.wake()

    def export_pages(self) -> Iterator[Page]:
        """While pages come in: those in their blocks. From then on vLLM's next step tells where all of them are."""
        with self.changed:
            self._require_alive()
            blocks, fence = self._blocks[: self._written], self._after
            if self._received or not self._blocks:
                blocks, fence = self._find_prompt()
            copier = self._begin_copy()
        try:
            found = []
            for at in range(0, len(blocks), copier.batch):
                found += list(copier.read(blocks[at : at + copier.batch], fence))
        finally:
            self._end_copy()
        return iter([self._page(index, data) for index, data in enumerate(found)])

    def _find_prompt(self) -> Prompt:
        """Caller holds `changed`."""
        if not self._keeping:
            raise EngineError("the pages were not kept")
        if not self.pages:
            return Prompt([], Fence())
        self._wait(lambda: self._prompt is not None or self._gone, _PROMPT_S)
        if self._prompt is None:
            raise EngineError("vLLM has not said in time where the pages are")
        return self._prompt

    def _page(self, index: int, data: PageArray) -> Page:
        tokens = page_tokens(index, self.request.transfer_tokens)
        data[:, :, :, tokens:] = 0
        return Page(index, tokens, data)

    def _take_steps(self) -> Iterator[TokenStep]:
        samples = 1 + len(self.siblings)
        for step in handed_on(self._take, lambda: len(self._exchange.by_key), self._last):
            samples -= step.finish is not None
            yield step
            if not samples:
                return

    def _take(self) -> list[TokenStep]:
        with self.changed:
            self._wait(lambda: bool(self._steps))
            steps, self._steps = self._steps, []
            return steps

    def close(self) -> None:
        self._last.set()
        super().close()
        for sibling in self.siblings:
            sibling.close()

    # --- the engine thread's side

    @property
    def admitted(self) -> bool:
        return self._admitted

    def admit(self, held: int, blocks: Sequence[int], after: Fence) -> None:
        """The request has blocks. Pages [0, held) are in them; the rest is imported unless vLLM computes it.

        Work on the blocks by whoever had them before is over once `after` has passed.
        """
        with self.changed:
            self._held = held
            self._blocks = list(blocks)
            self._next = self._written = held if self._blocks else self.pages
            self._after = after
            self._admitted = True
            self.changed.notify_all()

    @property
    def keeping(self) -> bool:
        return self._keeping

    @property
    def released(self) -> bool:
        """Kept until `close`: as of an export, vLLM holds the blocks behind the last step."""
        return not self._keeping or (self._closed and not self._copying)

    def locate(self, blocks: Sequence[int], fence: Fence) -> None:
        """The whole prompt is in these blocks once `fence` has passed."""
        with self.changed:
            self._prompt = Prompt(list(blocks[: self.pages]), fence)
            self.changed.notify_all()

    def withdraw(self) -> None:
        """A preemption took the blocks: vLLM computes the prompt again by itself."""
        with self.changed:
            self._prompt, self._blocks = None, []
            self.changed.wait_for(lambda: not self._copying)

    def deliver(self, step: TokenStep) -> None:
        with self.changed:
            self._steps.append(step)
            self.changed.notify_all()
        if step.finish is not None:
            self._last.set()

    def fail(self, error: CrossfillError) -> None:
        super().fail(error)
        self._last.set()


class Sibling(VllmTicket):
    """Another sample of an Intake's request: in vLLM a request of its own, which begins once the first sample runs.

    By then the prompt's full pages are in vLLM's prefix cache; the tokens behind them (fewer than 65) it computes.
    """

    def __init__(self, first: Intake, sample: int, text: Text) -> None:
        super().__init__(f"{first.key}.{sample}", first.request, first._exchange, [text])
        self.sample = sample
        self._first = first

    def fail(self, error: CrossfillError) -> None:
        super().fail(error)
        self._first.fail(error)

    def deliver(self, step: TokenStep) -> None:
        self._first.deliver(step)
