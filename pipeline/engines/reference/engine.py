"""ReferenceEngine: one thread that, turn by turn, computes one prefill chunk and one token of every decoding request.

Prompts are computed one after another, in order of arrival; a new one starts only while fewer than `held_pages`
pages wait for export. Decode requests are admitted in order of arrival, and before new prompts: they are what
gives room back.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread

from pipeline import prefix
from pipeline.checkpoint import eos_token_ids, read_contract
from pipeline.engines.base import Admission, Capabilities, Check, EngineStats, Prefill, wait_in_slices
from pipeline.engines.feature import SUPPORTED
from pipeline.engines.reference.decode import DecodeRun
from pipeline.engines.reference.model import Model
from pipeline.engines.reference.prefill import PrefillRun
from pipeline.engines.reference.room import Room
from pipeline.engines.reference.run import Run
from pipeline.engines.store import PageStore
from pipeline.engines.text import Text, texts
from pipeline.errors import ContextLengthError, CrossfillError, DeadlineError, EngineError, InvalidParameterError
from pipeline.grammar import Compiler
from pipeline.page import PAGE_TOKENS
from pipeline.request import Request
from pipeline.settings import EngineSettings


class ReferenceEngine:
    """Implements `engines.base.Engine`. `entropy` seeds the draws of requests that bring no seed."""

    name = "reference"

    def __init__(
        self, directory: Path, settings: EngineSettings, *, entropy: Callable[[], int] = lambda: secrets.randbits(64)
    ) -> None:
        self.directory = directory
        self.contract = read_contract(directory, context_length=settings.context_length)
        self.condition = Condition()
        self.model = Model.load(directory)
        self.room = Room(settings.kv_cache_bytes // self.contract.page_shape.page_bytes, settings.max_running)
        self.capabilities = Capabilities(
            max_running=settings.max_running,
            kv_tokens=self.room.pages * PAGE_TOKENS,
            features=SUPPORTED[self.name],
        )
        self.store = PageStore(settings.prefix_cache_bytes)
        self.chunk_tokens = settings.chunk_tokens
        self.prompt_tokens_computed = 0
        self.tokens_sampled = 0
        self._settings = settings
        self._compiler = Compiler(directory, self.contract.vocab_size, eos_token_ids(directory))
        self._entropy = entropy
        self._queued: deque[PrefillRun] = deque()
        self._tickets: deque[DecodeRun] = deque()
        self._live: list[Run] = []
        self._down: CrossfillError | None = None
        self._thread = Thread(target=self._work, name="reference-engine", daemon=True)
        self._thread.start()

    def prefill(self, request: Request) -> Prefill:
        """Raises ContextLengthError, or EngineError for a prompt that can never fit."""
        self._require_prompt(request)
        run = PrefillRun(self, request, self._texts(request, 1) if request.first_token else ())
        with self.condition:
            self._require_up()
            self.room.require_possible(run.pages, run.seats)
            self._queued.append(run)
            self.condition.notify_all()
        return run

    def admit(
        self, request: Request, *, local: bool = False, timeout_s: float = 60.0, check: Check = lambda: None
    ) -> Admission:
        """Raises ContextLengthError, EngineError for a request that can never fit, DeadlineError."""
        run = self._decode_run(request, local)
        with self.condition:
            self._require_up()
            self.room.require_possible(run.pages, run.seats)
            self._tickets.append(run)
        try:
            if not wait_in_slices(lambda slice_s: self._begin(run, slice_s), timeout_s, check):
                raise self._no_room(run, timeout_s)
        finally:
            with self.condition:
                self._tickets.remove(run)
                self.condition.notify_all()
        return run

    @property
    def failure(self) -> CrossfillError | None:
        return self._down

    def stats(self) -> EngineStats:
        with self.condition:
            live = [*self._queued, *self._live]
            return EngineStats(
                running=len(live),
                held_pages=sum(run.waiting_pages for run in live),
                cached_pages=self.store.stats().pages,
                free_pages=self.room.free_pages,
                prompt_tokens_computed=self.prompt_tokens_computed,
                tokens_sampled=self.tokens_sampled,
            )

    def reset_prefix_cache(self) -> None:
        self.store.clear()

    def close(self) -> None:
        self._go_down(EngineError("the engine was closed"))
        self._thread.join()

    def seed(self, salt: str) -> bytes:
        return prefix.seed(self.contract.digest, salt)

    def leave(self, run: Run) -> None:
        """A run has ended and gave back what it had. Under the condition."""
        self._live = [other for other in self._live if other is not run]
        self._queued = deque(other for other in self._queued if other is not run)

    def _require_prompt(self, request: Request) -> None:
        prompt_tokens = len(request.token_ids)
        if prompt_tokens == 0:
            raise InvalidParameterError("prompt", "the prompt holds no token")
        if prompt_tokens >= self.contract.context_length:  # one token at least must fit behind it
            raise ContextLengthError(self.contract.context_length, prompt_tokens, "prompt")

    def _decode_run(self, request: Request, local: bool) -> DecodeRun:
        self._require_prompt(request)
        sampling = request.sampling
        if sampling.max_tokens < 1:
            raise InvalidParameterError("max_tokens", f"max_tokens is {sampling.max_tokens}: it must be 1 or more")
        limit = min(sampling.max_tokens, self.contract.context_length - len(request.token_ids))
        return DecodeRun(self, request, self._texts(request, limit), local=local, limit=limit)

    def _texts(self, request: Request, limit: int) -> list[Text]:
        return texts(request, self.contract.vocab_size, self._compiler, self._entropy, limit)

    def _begin(self, run: DecodeRun, timeout_s: float) -> bool:
        """Begin it as soon as it is its turn and there is room; False when that does not come. Raises what ended the
        engine. The condition is held for this wait alone: between two of them nobody else is kept waiting."""

        def may_begin() -> bool:
            return self._tickets[0] is run and self.room.can_take(run.pages, run.seats)

        with self.condition:
            self.condition.wait_for(lambda: self._down is not None or may_begin(), timeout_s)
            self._require_up()
            if not may_begin():
                return False
            run.begin()
            self._live.append(run)
            return True

    def _no_room(self, run: DecodeRun, timeout_s: float) -> DeadlineError:
        with self.condition:
            return DeadlineError(
                f"no room for {run.pages} pages within {timeout_s:g} s: {self.room.free_pages} pages and "
                f"{self.room.free_seats} seats are free, {len(self._tickets) - 1} requests wait too"
            )

    def _require_up(self) -> None:
        if self._down is not None:
            raise self._down

    def _go_down(self, error: CrossfillError) -> None:
        with self.condition:
            self._down = self._down or error
            for run in [*self._queued, *self._live]:
                run.end(self._down)
            self.condition.notify_all()

    def _work(self) -> None:
        try:
            while turn := self._next_turn():
                for run in turn:
                    self._guard(run, run.step)
        except BaseException as error:
            self._go_down(EngineError(f"the engine thread died: {error!r}"))
            raise

    def _next_turn(self) -> list[Run]:
        """Block until there is work: one chunk at most, then every request that wants a token. Empty: go down."""
        with self.condition:
            while self._down is None:
                self._start_prompts()
                chunk = [run for run in self._live if run.wants_chunk][:1]
                tokens = [run for run in self._live if isinstance(run, DecodeRun) and run.wants_token]
                if chunk or tokens:
                    return [*chunk, *tokens]
                self.condition.wait()
            return []

    def _start_prompts(self) -> None:
        while self._queued and self._may_start(self._queued[0]):
            run = self._queued.popleft()
            self._live.append(run)
            self._guard(run, run.begin)

    def _may_start(self, run: PrefillRun) -> bool:
        prompts = [other for other in self._live if isinstance(other, PrefillRun)]
        if any(other.wants_chunk for other in prompts):
            return False
        if sum(other.waiting_pages for other in prompts) >= self._settings.held_pages:
            return False
        reserved = self._tickets[0].pages if self._tickets else 0
        return self.room.can_take(run.pages + reserved, 0)

    def _guard(self, run: Run, call: Callable[[], None]) -> None:
        """One bad request must not take the engine down with it."""
        try:
            call()
        except CrossfillError as error:
            self._fail(run, error)
        except Exception as error:
            self._fail(run, EngineError(f"handoff {run.request.handoff_id}: {error!r}"))

    def _fail(self, run: Run, error: CrossfillError) -> None:
        with self.condition:
            run.end(error)
