"""FakeEngine: both roles without a model. Its pages and its text are functions of the prompt alone.

It goes as far as its gates allow and blocks there, so that a test meets a handoff in any state it wants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.contract import Contract
from pipeline.engines.base import Capabilities, Check, EngineStats, TokenStep, wait_in_slices
from pipeline.errors import CrossfillError, DeadlineError, EngineError, HandoffCancelledError
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, page_count, page_tokens
from pipeline.request import Request
from pipeline.settings import EngineSettings

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=1, head_dim=4, vocab_size=1024, context_length=4096)
PAGE_BYTES = CONTRACT.page_shape.page_bytes
ALL = 1 << 30  # a gate that is open


def pages(request: Request) -> list[Page]:
    """The KV of a prompt: noise from a generator seeded with its token ids."""
    noise = np.random.default_rng(request.token_ids)
    made = []
    for index in range(page_count(request.transfer_tokens)):
        data, tokens = CONTRACT.page_shape.empty(), page_tokens(index, request.transfer_tokens)
        data[:, :, :, :tokens] = noise.standard_normal(data[:, :, :, :tokens].shape)
        made.append(Page(index, tokens, data))
    return made


def text(request: Request) -> tuple[int, ...]:
    """What follows a prompt: `max_tokens` token ids."""
    noise = np.random.default_rng([1, *request.token_ids])
    return tuple(int(i) for i in noise.integers(3, CONTRACT.vocab_size, request.sampling.max_tokens))


class FakeEngine:
    """Implements `engines.base.Engine`. Gates and faults are set by `set`, which wakes whoever waits."""

    name = "fake"

    def __init__(
        self,
        checkpoint: Path = Path(),
        settings: EngineSettings | None = None,
        *,
        contract: Contract = CONTRACT,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.contract = contract
        self.capabilities = capabilities or Capabilities(max_running=4)
        self.failure: CrossfillError | None = None
        self.condition = threading.Condition()
        self.ready_pages = ALL  # gate: pages of a prompt that P has computed
        self.drawn = True  # gate: P has drawn the first token
        self.seats = ALL  # gate: prompts that D has room for
        self.imports = ALL  # gate: pages that may be imported into one admission
        self.tokens = ALL  # gate: tokens that D has sampled of one text
        self.script: list[TokenStep] | None = None  # what D says instead of the text
        self.script_ends = True  # gate: behind it
        self.held = 0  # pages of any prompt that D holds already
        self.bad_page: int | None = None  # fault: P fails at this page
        self.first_tokens: tuple[int, ...] | None = None  # fault: what P says instead of the text's first token
        self.first_logprobs: tuple[TokenLogprob, ...] = ()  # what P says beside it
        self.decode_error: CrossfillError | None = None  # fault: D fails at its token gate
        self.close_error: CrossfillError | None = None  # fault: of every `close`
        self.on_prefill: Callable[[], object] = lambda: None
        self.on_close: Callable[[], object] = lambda: None
        self.waiting = 0  # callers in `admit`
        self.works: list[Work] = []  # everything ever handed out

    def set(self, **gates: object) -> None:
        with self.condition:
            for name, value in gates.items():
                setattr(self, name, value)
            self.condition.notify_all()

    def prefill(self, request: Request) -> FakePrefill:
        self.on_prefill()
        return FakePrefill(self, request)

    def admit(
        self, request: Request, *, local: bool = False, timeout_s: float = 60.0, check: Check = lambda: None
    ) -> FakeAdmission:
        with self.condition:
            self.waiting += 1
            try:
                free = wait_in_slices(lambda s: self.condition.wait_for(lambda: self.seats > 0, s), timeout_s, check)
            finally:
                self.waiting -= 1
            if not free:
                raise DeadlineError("no room")
            self.seats -= 1
            return FakeAdmission(self, request, local)

    @property
    def live(self) -> list[Work]:
        """Handed out and not closed."""
        return [work for work in self.works if not work.closed]

    @property
    def imported(self) -> list[Page]:
        """Of the latest admission."""
        return next((work.pages for work in reversed(self.works) if isinstance(work, FakeAdmission)), [])

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.live))

    def reset_prefix_cache(self) -> None:
        self.held = 0

    def close(self) -> None:
        self.set(failure=EngineError("the engine was closed"))


class Work:
    """Something that is handed out and must be closed."""

    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self.engine = engine
        self.request = request
        self.closed = False
        engine.works.append(self)

    def close(self) -> None:
        with self.engine.condition:
            first, self.closed = not self.closed, True
            self.engine.condition.notify_all()
        if first:
            self.engine.on_close()
        if self.engine.close_error is not None:
            raise self.engine.close_error

    def until(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        with self.engine.condition:
            self.engine.condition.wait_for(lambda: self.closed or self.engine.failure or ready(), timeout_s)
            if self.closed:
                raise HandoffCancelledError(f"handoff {self.request.handoff_id} was closed")
            if self.engine.failure is not None:
                raise self.engine.failure
            return ready()


class FakePrefill(Work):
    """Implements `engines.base.Prefill`."""

    def __init__(self, engine: FakeEngine, request: Request) -> None:
        super().__init__(engine, request)
        self._pages = pages(request)
        self._skipped = 0

    def wait_ready(self, index: int, timeout_s: float) -> bool:
        if index == self.engine.bad_page:
            raise EngineError(f"page {index} is bad")
        return self.until(lambda: index < self.engine.ready_pages, timeout_s)

    def read(self, index: int) -> Page:
        assert index >= self._skipped, "a skipped page was read"
        self.until(lambda: index < self.engine.ready_pages)
        return self._pages[index]

    def skip_to(self, index: int) -> None:
        self._skipped = index

    def wait_done(self, timeout_s: float) -> bool:
        return self.until(lambda: self.done and self.engine.drawn, timeout_s)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        if self.engine.first_tokens is not None:
            return self.engine.first_tokens
        return text(self.request)[:1] if self.request.first_token else ()

    @property
    def first_logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.engine.first_logprobs

    @property
    def done(self) -> bool:
        return self.engine.ready_pages >= len(self._pages)


class FakeAdmission(Work):
    """Implements `engines.base.Admission`."""

    def __init__(self, engine: FakeEngine, request: Request, local: bool) -> None:
        super().__init__(engine, request)
        self.local = local
        self.held_pages = min(engine.held, page_count(request.transfer_tokens))
        self.pages: list[Page] = []
        self.kept = False

    def keep_pages(self) -> None:
        self.kept = True

    def export_pages(self) -> Iterator[Page]:
        self.until(lambda: True)
        whole = pages(self.request)
        return iter(whole if self.local else [*whole[: self.held_pages], *self.pages])

    def import_page(self, page: Page) -> None:
        self.until(lambda: len(self.pages) < self.engine.imports)
        self.pages.append(Page(page.index, page.tokens, page.data.copy()))

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        whole = page_count(self.request.transfer_tokens)
        assert self.local or self.held_pages + len(self.pages) == whole, "decode from a part of the pages"
        self.first = (tuple(first_tokens), tuple(first_logprobs))
        if self.engine.script is not None:
            return self._said(self.engine.script)
        return self._steps([*first_tokens, *text(self.request)[len(first_tokens) :]])

    def _steps(self, tokens: list[int]) -> Iterator[TokenStep]:
        for at, token in enumerate(tokens):
            self._await_token(at)
            yield TokenStep((token,), "length" if at == len(tokens) - 1 else None)

    def _said(self, script: list[TokenStep]) -> Iterator[TokenStep]:
        yield from script
        if not self.engine.script_ends:
            self.until(lambda: self.engine.script_ends)

    def _await_token(self, at: int) -> None:
        self.until(lambda: at < self.engine.tokens or self.engine.decode_error is not None)
        if at >= self.engine.tokens and self.engine.decode_error is not None:
            raise self.engine.decode_error

    def close(self) -> None:
        with self.engine.condition:
            self.engine.seats += not self.closed
        super().close()
