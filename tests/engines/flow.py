"""What the engine tests do over and over: make a prompt, ship a handoff, read the text, wait for rest.

Text is compared with the oracle as far as its margins allow: the KV of two engines differs by about 2e-3 relative,
so a token whose best logit leads by less than EPSILON may rightly flip, and all after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.base import Admission, DecodeEngine, Engine, EngineStats, FinishReason, PrefillEngine, TokenStep
from pipeline.engines.reference.model import Model
from pipeline.engines.reference.oracle import SplitRun, split_prefill, split_run
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, page_count
from pipeline.request import Request, Sampling

EPSILON = 0.05  # logits of the tiny checkpoints have a standard deviation near 1
PATIENCE_S = 60.0
GREEDY = Sampling(max_tokens=8, temperature=0.0)


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Random ordinary token ids of the tiny vocabulary; one seed, one endless text cut to length."""
    return tuple(int(i) for i in np.random.default_rng(seed).integers(16, 1024, tokens))


def request(
    token_ids: Sequence[int], sampling: Sampling = GREEDY, *, salt: str = "", to: Engine | None = None
) -> Request:
    """A request as the API would make it for `to` as its decode engine; by default for one of the usual kind."""
    first_token = to is not None and to.capabilities.needs_first_token
    return Request(f"h-{time.monotonic_ns():x}", tuple(token_ids), sampling, salt, first_token)


@dataclass(frozen=True)
class Oracle:
    """The reference model of one checkpoint."""

    model: Model

    @lru_cache(maxsize=256)  # noqa: B019 - lives as long as the session
    def text(self, token_ids: tuple[int, ...], count: int = 8) -> SplitRun:
        return split_run(self.model, token_ids, count)

    def logits(self, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
        """`(vocab,)` after the whole prompt."""
        return split_prefill(self.model, token_ids, 0)[1]

    def sure_prompt(
        self,
        tokens: int,
        count: int = 8,
        *,
        shared: Sequence[int] = (),
        suits: Callable[[tuple[int, ...], tuple[int, ...]], bool] = lambda ids, said: True,
    ) -> tuple[int, ...]:
        """A prompt, beginning with `shared`, whose first `count` greedy tokens all lead by more than EPSILON, and which
        `suits` together with these."""
        for seed in range(1000, 1400):
            ids = (*shared, *prompt(tokens - len(shared), seed))
            run = self.text(ids, count)
            if min(run.margins) > EPSILON and len(set(run.tokens)) > count // 2 and suits(ids, tuple(run.tokens)):
                return ids
        raise AssertionError(f"no prompt of {tokens} tokens has {count} sure tokens")


@dataclass
class Tally:
    """How many tokens were really compared."""

    compared: int = 0

    def compare(self, got: Sequence[int], expected: SplitRun) -> None:
        assert len(got) == len(expected.tokens)
        for at, (ours, theirs, margin) in enumerate(zip(got, *expected, strict=True)):
            if margin > EPSILON:
                assert ours == theirs, f"token {at} differs though the oracle's margin is {margin:.3f}"
                self.compared += 1
            elif ours != theirs:
                return  # a tie fell the other way: the two texts have nothing more in common


class Shipment(list[Page]):
    """What P sends: its pages, and the first token where one was asked for."""

    first_tokens: tuple[int, ...] = ()
    first_logprobs: tuple[TokenLogprob, ...] = ()


def export(engine: PrefillEngine, order: Request, *, first: int = 0) -> Shipment:
    """Prefill, and read every page from `first` on."""
    running = engine.prefill(order)
    try:
        running.skip_to(first)
        pages = Shipment()
        for index in range(first, page_count(order.transfer_tokens)):
            assert running.wait_ready(index, PATIENCE_S)
            pages.append(running.read(index))
        assert running.wait_done(PATIENCE_S)
        pages.first_tokens = running.first_tokens
        pages.first_logprobs = running.first_logprobs
        assert len(pages.first_tokens) == order.first_token * order.sampling.n
        return pages
    finally:
        running.close()


def deliver(
    engine: DecodeEngine, order: Request, pages: Shipment | list[Page]
) -> tuple[list[int], int, FinishReason | None]:
    """Admit, import what is not held, decode: the token ids, the pages that were held, how it finished."""
    admission = engine.admit(order, timeout_s=PATIENCE_S)
    try:
        held = admission.held_pages
        import_missing(admission, pages)
        ids, finish = read_text(_decoding(admission, pages))
        return ids, held, finish
    finally:
        admission.close()


def _decoding(admission: Admission, pages: Shipment | list[Page]) -> Iterator[TokenStep]:
    if isinstance(pages, Shipment):
        return admission.decode(pages.first_tokens, pages.first_logprobs)
    return admission.decode()


@dataclass
class Sample:
    """One of a request's texts."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None


def deliver_samples(engine: DecodeEngine, order: Request, pages: Shipment | list[Page]) -> list[Sample]:
    """As `deliver`, for every sample."""
    admission = engine.admit(order, timeout_s=PATIENCE_S)
    try:
        import_missing(admission, pages)
        return read_samples(_decoding(admission, pages), order.sampling)
    finally:
        admission.close()


def read_samples(steps: Iterable[TokenStep], sampling: Sampling) -> list[Sample]:
    samples = [Sample() for _ in range(sampling.n)]
    for step in steps:
        sample = samples[step.sample]
        assert sample.finish is None, "a step came after the sample's last one"
        sample.ids += step.token_ids
        assert (step.logprobs is None) == (sampling.logprobs is None)
        sample.logprobs += step.logprobs or ()
        sample.finish = step.finish
    assert all(sample.finish for sample in samples)
    return samples


def computed_on_decode(engine: Engine) -> int:
    """Prompt tokens that D computes of a prompt that was handed over whole."""
    return 0 if engine.capabilities.needs_first_token else 1


def hand_over(source: PrefillEngine, target: Engine, token_ids: Sequence[int]) -> list[int]:
    """The text of one greedy handoff."""
    order = request(token_ids, to=target)
    return deliver(target, order, export(source, order))[0]


def import_missing(admission: Admission, pages: Iterable[Page]) -> None:
    held = admission.held_pages
    for page in pages:
        if page.index >= held:
            admission.import_page(page)


def read_text(steps: Iterable[TokenStep]) -> tuple[list[int], FinishReason | None]:
    ids: list[int] = []
    finish: FinishReason | None = None
    for step in steps:
        assert finish is None, "a step came after the last one"
        ids += step.token_ids
        finish = step.finish
    return ids, finish


def compute_locally(engine: DecodeEngine, order: Request) -> list[int]:
    admission = engine.admit(order, local=True, timeout_s=PATIENCE_S)
    try:
        return read_text(admission.decode())[0]
    finally:
        admission.close()


def at_rest(stats: EngineStats) -> EngineStats:
    """The gauges, without what may differ at rest: the counters and the prefix cache."""
    return replace(stats, cached_pages=0, prompt_tokens_computed=0, tokens_sampled=0)


def settles(engine: Engine, baseline: EngineStats) -> bool:
    """Whether the gauges are back at `baseline` soon."""
    return eventually(lambda: at_rest(engine.stats()) == at_rest(baseline))


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Waiter:
    """A blocking call on a thread of its own; `error` is what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.value: object = None
        self.error: BaseException | None = None
        self._call = call
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the call still waits"
