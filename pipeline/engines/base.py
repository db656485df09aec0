"""What an engine is to the rest of Crossfill: two roles, shaped by pages, not by an engine's own call sites.

Everything blocks and is called from the thread of one job; an engine runs its steps on its own thread and never
waits for a job. `close()` of whatever a role returned is idempotent, may come from any thread, wakes every
waiting call (they raise HandoffCancelledError), drains running copies, and only then frees blocks.
Engines know neither broker nor frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.contract import Contract
from pipeline.errors import CrossfillError
from pipeline.logprob import TokenLogprob
from pipeline.page import Page
from pipeline.request import Request

WAIT_SLICE_S = 0.25
Check = Callable[[], None]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the two roles may be asked. `max_running`: requests one engine steps at once."""

    can_prefill: bool = True  # this engine can compute a prompt by itself (SGLang in decode mode cannot)
    needs_first_token: bool = False  # decode imports the whole prompt's KV and continues P's first token
    max_running: int = 16
    kv_tokens: int = 0  # the most tokens, prompt and answer, that one request may hold; 0: only the context limits it
    features: frozenset[str] = frozenset()  # those of `request.FEATURES` that it has; routing asks no other of it


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges that are zero (or `baseline` for free blocks) when nothing runs, and two counters that only grow."""

    running: int = 0  # requests inside the engine, both roles
    held_pages: int = 0  # pages kept for export or import of live requests
    cached_pages: int = 0  # prefix cache; may be non-zero at rest
    free_pages: int = 0  # what a new request could use
    prompt_tokens_computed: int = 0  # counter: prompt tokens this engine ran through the model
    tokens_sampled: int = 0  # counter


@dataclass(frozen=True, slots=True)
class TokenStep:
    """Token ids of one engine step for one sample of a request, in order; `finish` is set on its last one only.

    `logprobs` stand beside `token_ids` where the request asked for them.
    """

    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    sample: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None


class Prefill(Protocol):
    """One prompt being computed. Pages become ready in order, while later chunks still compute."""

    def wait_ready(self, index: int, timeout_s: float) -> bool:
        """True once page `index` may be read; False after `timeout_s`. Raises EngineError, HandoffCancelledError."""
        ...

    def read(self, index: int) -> Page:
        """Copy page `index` out (a fresh array); its tokens are min(64, transfer_tokens - 64 * index).

        The blocks of a page stay held until it was read or passed over by `skip_to`, or the prefill is closed.
        Waits again when a preemption made the page un-ready.
        """
        ...

    def skip_to(self, index: int) -> None:
        """Pages before `index` will never be read: the decode engine holds them."""
        ...

    def wait_done(self, timeout_s: float) -> bool:
        """True once `done`; False after `timeout_s`. Raises EngineError, HandoffCancelledError."""
        ...

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """What P drew for a request with `first_token`, one for each sample; else empty. Valid once `done`."""
        ...

    @property
    def first_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Those of `first_tokens`, where the request asks for any."""
        ...

    @property
    def done(self) -> bool:
        """The whole prompt has been computed (pages may still wait to be read)."""
        ...

    def close(self) -> None: ...


class Admission(Protocol):
    """Room for one prompt inside a decode engine, and the decoding that follows."""

    @property
    def held_pages(self) -> int:
        """Leading pages that the engine already holds and has pinned for this request."""
        ...

    def import_page(self, page: Page) -> None:
        """Copy a verified page in. In order, from `held_pages` on. Raises EngineError, HandoffCancelledError."""
        ...

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        """Every page is there: join the running batch and yield steps until every sample had one with `finish`.

        `first_tokens` and their logprobs are P's, for a request with `first_token` only: they come out again as the
        first step of each sample.
        """
        ...

    def keep_pages(self) -> None:
        """Keep the prompt's pages readable until `close`, also behind the last step. Any time before that step."""
        ...

    def export_pages(self) -> Iterator[Page]:
        """Copies of the leading pages that are there, held ones included: all of them, once a step has come.

        For captures. Behind the last step only after `keep_pages`. Raises EngineError, HandoffCancelledError.
        """
        ...

    def close(self) -> None: ...


class PrefillEngine(Protocol):
    def prefill(self, request: Request) -> Prefill:
        """Queue the prompt for compute and return at once."""
        ...


class DecodeEngine(Protocol):
    def admit(
        self, request: Request, *, local: bool = False, timeout_s: float = 60.0, check: Check = lambda: None
    ) -> Admission:
        """Reserve room, blocking up to `timeout_s` (then DeadlineError).

        `local`: nothing will be imported, the engine computes what it does not hold itself. `check` is called at
        least every WAIT_SLICE_S while blocked; what it raises ends the wait and gives the place in line back.
        """
        ...


class Engine(PrefillEngine, DecodeEngine, Protocol):
    """Both roles beside one loaded model. Constructing it loads the model; `close` ends its thread."""

    @property
    def name(self) -> str: ...

    @property
    def contract(self) -> Contract: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def failure(self) -> CrossfillError | None:
        """What ended the engine; None while it works. A worker whose engine has ended gives up its lease."""
        ...

    def stats(self) -> EngineStats: ...

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes (tests, and operators after a suspected fault). Live requests keep their pages."""
        ...

    def close(self) -> None: ...


def wait_in_slices(wait: Callable[[float], bool], timeout_s: float, check: Check) -> bool:
    """`wait(slice_s)` until it is true or `timeout_s` is over, with `check()` in between."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        if wait(max(0.0, min(left, WAIT_SLICE_S))):
            return True
        if left <= WAIT_SLICE_S:
            return False
        check()
