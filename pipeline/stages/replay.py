"""Replay: a stored handoff on an engine again. Its pages are imported and decoded, or computed afresh and compared.

No broker takes part. What was recorded is compared token by token; where the two part, the engine's own margin between
its best two tokens says whether rounding may have decided (KV of two engines differs by about 2e-3 relative).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from pipeline.capture import Capture
from pipeline.contract import require_equal
from pipeline.engines.base import Engine, TokenStep
from pipeline.errors import CaptureError, EngineError
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, page_count, page_tokens
from pipeline.request import Request, Sampling

EPSILON = 0.1  # of log-probability between the best two: below it another engine's rounding may choose the other
_WAIT_S = 600.0  # for one page of an engine on a slow CPU


@dataclass(slots=True)
class Heard:
    """What one sample said in a replay. `margins`: best minus second best, where the engine tells."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish: str | None = None

    def hear(self, step: TokenStep) -> None:
        self.tokens += step.token_ids
        self.finish = step.finish
        for one in step.logprobs or ():
            self.logprobs.append(one.logprob)
            self.margins.append(_margin(one))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sample against what was recorded. `parted`: the first position that differs, None where none does."""

    recorded: tuple[int, ...]
    replayed: tuple[int, ...]
    parted: int | None
    margin: float | None  # of the replay, where they part
    logprob_error: float | None  # largest difference over the common tokens, where both sides have it
    comparable: bool  # greedy, or the same engine with the same seed

    @property
    def compared(self) -> int:
        """Tokens that were compared and are equal."""
        return min(len(self.recorded), len(self.replayed)) if self.parted is None else self.parted

    @property
    def same(self) -> bool:
        return self.parted is None

    @property
    def fault(self) -> bool:
        """They part, and rounding does not explain it."""
        near = self.margin is not None and self.margin < EPSILON
        return self.comparable and not self.same and not near


def decode(engine: Engine, capture: Capture, pages: Iterable[Page]) -> list[Heard]:
    """Import the recorded pages and decode, one Heard a sample.

    Raises CaptureError when the capture cannot be decoded, ContractMismatchError, EngineError.
    """
    request = _request(engine, capture)
    first_tokens = capture.first_tokens if request.first_token else ()
    heard = [Heard() for _ in range(request.sampling.n)]
    with closing(engine.admit(request)) as admission:
        for page in fitted(pages, capture.request.transfer_tokens, request.transfer_tokens):
            if page.index >= admission.held_pages:
                admission.import_page(page)
        for step in admission.decode(first_tokens, _first_logprobs(capture, request)):
            heard[step.sample].hear(step)
    return heard


def prefill(engine: Engine, capture: Capture, *, first_token: bool | None = None) -> tuple[Capture, list[Page]]:
    """Compute the prompt's pages again: a capture with the same text to compare with, its pages beside it.

    `first_token`: whether a decode engine wants the whole prompt's KV and P's first token; None: as recorded.
    """
    _require_readable(capture)
    require_equal(engine.contract, capture.contract)
    if not engine.capabilities.can_prefill:
        raise EngineError(f"{engine.name} cannot compute a prompt in this role")
    wants = capture.request.first_token if first_token is None else first_token
    request = replace(capture.request, first_token=wants)
    pages: list[Page] = []
    with closing(engine.prefill(replace(request, handoff_id=secrets.token_hex(16)))) as work:
        for index in range(page_count(request.transfer_tokens)):
            if not work.wait_ready(index, _WAIT_S):
                raise EngineError(f"{engine.name} did not compute page {index} within {_WAIT_S:g} s")
            pages.append(work.read(index))
        if not work.wait_done(_WAIT_S):
            raise EngineError(f"{engine.name} drew no first token within {_WAIT_S:g} s")
        first_tokens = work.first_tokens
    made = replace(capture, request=request, pages=len(pages), held_pages=0, first_tokens=first_tokens)
    return replace(made, trace=capture.trace | {"prefilled_again_by": engine.name}, error=None), pages


def fitted(pages: Iterable[Page], recorded_tokens: int, wanted_tokens: int) -> Iterator[Page]:
    """Pages of `recorded_tokens` as those of `wanted_tokens`, at most as many: the rows behind them are zero again."""
    if wanted_tokens > recorded_tokens:
        raise CaptureError(
            f"the capture holds the KV of {recorded_tokens} tokens and this engine decodes only from that of all "
            f"{wanted_tokens}: have it computed with --prefill ENGINE"
        )
    for page in pages:
        tokens = page_tokens(page.index, wanted_tokens)
        if tokens < 1:
            return
        if tokens < page.tokens:
            data = page.data.copy()
            data[:, :, :, tokens:] = 0
            page = Page(page.index, tokens, data)
        yield page


def compare(capture: Capture, engine: str, heard: Sequence[Heard]) -> list[Verdict]:
    """Per sample."""
    sampling = capture.request.sampling
    comparable = sampling.temperature == 0 or (sampling.seed is not None and capture.engine == engine)
    recorded_logprobs = capture.logprobs or [()] * len(heard)
    pairs = zip(capture.tokens, recorded_logprobs, heard, strict=True)
    return [_verdict(tokens, logprobs, said, comparable) for tokens, logprobs, said in pairs]


def _verdict(recorded: tuple[int, ...], logprobs: Sequence[float], said: Heard, comparable: bool) -> Verdict:
    common = min(len(recorded), len(said.tokens))
    parted = next((at for at in range(common) if recorded[at] != said.tokens[at]), None)
    margin = said.margins[parted] if parted is not None and parted < len(said.margins) else None
    both = list(zip(logprobs[:parted], said.logprobs, strict=False))
    error = max((abs(a - b) for a, b in both), default=None)
    return Verdict(recorded, tuple(said.tokens), parted, margin, error, comparable)


def _request(engine: Engine, capture: Capture) -> Request:
    _require_readable(capture)
    if not capture.whole:
        raise CaptureError(
            f"the capture holds {capture.pages} of {page_count(capture.request.transfer_tokens)} pages, the handoff "
            f"failed before the others came ({capture.error}): have them computed with --prefill ENGINE"
        )
    require_equal(engine.contract, capture.contract)
    features = engine.capabilities.features
    if lacking := capture.request.sampling.needs - features - {"logprobs"}:
        raise CaptureError(f"{engine.name} cannot decode this request: it has no {', '.join(sorted(lacking))}")
    sampling = _with_margins(capture.request.sampling, "logprobs" in features)
    first_token = engine.capabilities.needs_first_token
    return replace(capture.request, handoff_id=secrets.token_hex(16), sampling=sampling, first_token=first_token)


def _first_logprobs(capture: Capture, request: Request) -> tuple[TokenLogprob, ...]:
    """Of P's tokens, which are not drawn again: as recorded, so that they show no difference."""
    if not request.first_token or request.sampling.logprobs is None:
        return ()
    recorded = capture.logprobs or [()] * len(capture.first_tokens)
    pairs = zip(capture.first_tokens, recorded, strict=True)
    return tuple(TokenLogprob(token, logprobs[0] if logprobs else 0.0) for token, logprobs in pairs)


def _with_margins(sampling: Sampling, known: bool) -> Sampling:
    return replace(sampling, logprobs=max(2, sampling.logprobs or 0) if known else None)


def _require_readable(capture: Capture) -> None:
    if capture.redacted:
        raise CaptureError("the capture is redacted: it holds neither token ids nor pages, so nothing can be computed")


def _margin(one: TokenLogprob) -> float:
    best, second = (*(probability for _, probability in one.top), 0.0, 0.0)[:2]
    return best - second
