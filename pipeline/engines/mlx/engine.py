"""MlxEngine: both roles beside one model of mlx-lm. See `base.Engine`.

What a job asks is put together on its own thread: chain keys, pinned pages, staging. The Core computes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline import checkpoint as checkpoints
from pipeline import prefix
from pipeline.contract import Contract
from pipeline.engines.base import Capabilities, Check, EngineStats, wait_in_slices
from pipeline.engines.feature import SUPPORTED
from pipeline.engines.mlx.admission import ImportAdmission, LocalAdmission
from pipeline.engines.mlx.batch import Outbox, Row
from pipeline.engines.mlx.cache import STEP, capacity
from pipeline.engines.mlx.core import Core
from pipeline.engines.mlx.loop import Loop
from pipeline.engines.mlx.memory import Share
from pipeline.engines.mlx.prefill import MlxPrefill
from pipeline.engines.mlx.prompt import Prompt
from pipeline.engines.store import Pin
from pipeline.engines.text import Text, texts
from pipeline.errors import ContextLengthError, CrossfillError, DeadlineError
from pipeline.grammar import Compiler
from pipeline.page import PAGE_TOKENS
from pipeline.request import Request
from pipeline.settings import EngineSettings


def _entropy() -> int:
    return secrets.randbits(64)


class MlxEngine:
    """`entropy` gives the seed of a request that has none."""

    name = "mlx"

    def __init__(self, checkpoint: Path, settings: EngineSettings, *, entropy: Callable[[], int] = _entropy) -> None:
        self._contract = checkpoints.read_contract(checkpoint, context_length=settings.context_length)
        self._settings = settings
        self._entropy = entropy
        self._compiler = Compiler(checkpoint, self._contract.vocab_size, checkpoints.eos_token_ids(checkpoint))
        self._loop = Loop[Core]("mlx", lambda loop: Core(loop, checkpoint, self._contract, settings))
        self._core = self._loop.stepper

    @property
    def contract(self) -> Contract:
        return self._contract

    @property
    def capabilities(self) -> Capabilities:
        steps = self._core.memory.max_tokens // STEP - 1  # caches grow by whole steps, and `_room` asks for one more
        room = max(1, steps * STEP)  # 0 would be no bound at all
        return Capabilities(max_running=self._settings.max_running, kv_tokens=room, features=SUPPORTED[self.name])

    def prefill(self, request: Request) -> MlxPrefill:
        """Raises ContextLengthError, and EngineError when the prompt can never fit the memory."""
        self._require_context(request, len(request.token_ids))
        tokens = request.token_ids[: request.transfer_tokens]
        self._core.memory.require_fits(capacity(len(tokens)))
        first = self._texts(request, 1) if request.first_token else []
        keys, pin = self._pin(request)
        prompts: list[Prompt] = []
        pages = self._pages(tokens, keys, pin, on_close=lambda closed: self._drop(closed, prompts))
        self._core.enter(pages)
        if not pages.done:
            prompts.append(
                Prompt(
                    tokens,
                    pin.pages,
                    pages,
                    room=capacity(len(tokens)),
                    texts=first,
                    on_done=self._computed,
                    on_fail=pages.fail,
                )
            )
            try:
                self._core.submit(prompts[0])
            except BaseException:
                pages.close()
                raise
        return pages

    def admit(
        self, request: Request, *, local: bool = False, timeout_s: float = 60.0, check: Check = lambda: None
    ) -> ImportAdmission | LocalAdmission:
        """Raises DeadlineError, ContextLengthError, and EngineError when the request can never fit the memory."""
        self._require_context(request, len(request.token_ids) + 1)
        limit = min(request.sampling.max_tokens, self._contract.context_length - len(request.token_ids))
        outbox = Outbox()
        rows = [Row(text, limit, outbox, sample=sample) for sample, text in enumerate(self._texts(request, limit))]
        share = self._room(len(request.token_ids) + limit, len(rows), timeout_s, check)
        keys, pin = self._pin(request)
        try:
            if not local:
                return ImportAdmission(self._core, rows, outbox, pin, share, keys)
            tokens = request.token_ids[:-1]
            pages = self._pages(tokens, keys, pin, on_close=lambda _: None)
            return LocalAdmission(self._core, rows, outbox, pin, share, pages, tokens)
        except BaseException:
            pin.release()
            self._core.memory.release(share)
            raise

    @property
    def failure(self) -> CrossfillError | None:
        return self._core.failure

    def stats(self) -> EngineStats:
        core, live = self._core, self._core.live()
        return EngineStats(
            running=len(live),
            held_pages=sum(one.kept_pages for one in live),
            cached_pages=core.store.stats().pages,
            free_pages=core.memory.free_bytes // (PAGE_TOKENS * core.model.token_bytes),
            prompt_tokens_computed=core.prompt_tokens_computed,
            tokens_sampled=core.tokens_sampled,
        )

    def reset_prefix_cache(self) -> None:
        self._core.store.clear()

    def close(self) -> None:
        self._loop.stop()

    def _require_context(self, request: Request, tokens: int) -> None:
        if tokens > self._contract.context_length:
            raise ContextLengthError(self._contract.context_length, len(request.token_ids), "prompt")

    def _texts(self, request: Request, limit: int) -> list[Text]:
        return texts(request, self._contract.vocab_size, self._compiler, self._entropy, limit)

    def _pin(self, request: Request) -> tuple[list[bytes], Pin]:
        """Chain keys of all pages, and a hold on the leading full ones that are stored, the last token left out: it
        must be computed, for the logits behind it.
        """
        start = prefix.seed(self._contract.digest, request.salt)
        keys = prefix.chain(start, request.token_ids[: request.transfer_tokens])
        return keys, self._core.store.pin(keys[: (len(request.token_ids) - 1) // PAGE_TOKENS])

    def _pages(
        self, tokens: Sequence[int], keys: Sequence[bytes], pin: Pin, *, on_close: Callable[[MlxPrefill], None]
    ) -> MlxPrefill:
        core = self._core
        return MlxPrefill(len(tokens), keys, pin, core.store, on_free=core.loop.wake, on_close=on_close)

    def _room(self, tokens: int, rows: int, timeout_s: float, check: Check) -> Share:
        # One step more than its tokens: where two requests of different length are padded to one batch.
        share = self._core.memory.ask(capacity(tokens) + STEP, rows=rows)
        try:
            if not wait_in_slices(lambda slice_s: self._core.memory.wait(share, slice_s), timeout_s, check):
                raise DeadlineError(f"no room for {tokens} tokens within {timeout_s:g} s")
        except BaseException:
            self._core.memory.release(share)
            raise
        return share

    def _computed(self, prompt: Prompt, _: list[Any]) -> None:
        """The caches of a prefill are not wanted: its pages have left them."""
        if prompt.share is not None:
            self._core.memory.release(prompt.share)

    def _drop(self, pages: MlxPrefill, prompts: list[Prompt]) -> None:
        self._core.withdraw(prompts)
        for prompt in prompts:
            if prompt.share is not None:
                self._core.memory.release(prompt.share)
        self._core.exit(pages)
