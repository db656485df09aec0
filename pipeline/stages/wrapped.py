"""Wrapped: an engine and its admissions as another layer hands them on. What a layer does not change passes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.contract import Contract
from pipeline.engines.base import Admission, Capabilities, Check, Engine, EngineStats, Prefill, TokenStep
from pipeline.errors import CrossfillError
from pipeline.logprob import TokenLogprob
from pipeline.page import Page
from pipeline.request import Request


class WrappedEngine:
    """Implements `engines.base.Engine` over another one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def contract(self) -> Contract:
        return self._engine.contract

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def failure(self) -> CrossfillError | None:
        return self._engine.failure

    def prefill(self, request: Request) -> Prefill:
        return self._engine.prefill(request)

    def admit(
        self, request: Request, *, local: bool = False, timeout_s: float = 60.0, check: Check = lambda: None
    ) -> Admission:
        return self._engine.admit(request, local=local, timeout_s=timeout_s, check=check)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        self._engine.close()


class WrappedAdmission:
    """Implements `engines.base.Admission` over another one."""

    def __init__(self, admission: Admission) -> None:
        self._inner = admission
        self._held_pages = admission.held_pages

    @property
    def held_pages(self) -> int:
        return self._held_pages

    def import_page(self, page: Page) -> None:
        self._inner.import_page(page)

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        return self._inner.decode(first_tokens, first_logprobs)

    def keep_pages(self) -> None:
        self._inner.keep_pages()

    def export_pages(self) -> Iterator[Page]:
        return self._inner.export_pages()

    def close(self) -> None:
        self._inner.close()
