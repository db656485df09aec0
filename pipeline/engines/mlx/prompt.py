"""Prompt: one prompt being computed, chunk by chunk, on the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from pipeline.engines.mlx import cache as kv
from pipeline.engines.mlx.cache import Chunk, Tap
from pipeline.engines.mlx.memory import Share
from pipeline.engines.mlx.model import Model
from pipeline.engines.mlx.prefill import MlxPrefill
from pipeline.engines.mlx.sampler import Report, Sampler, draw, report
from pipeline.engines.text import Text
from pipeline.errors import CrossfillError, EngineError
from pipeline.logprob import TokenLogprob
from pipeline.page import PAGE_TOKENS, PageArray


class Prompt:
    """`tokens` are all the prompt's tokens whose KV is wanted; `held` are its leading pages, known already.

    `room` is the capacity of its caches in tokens. `share` is its part of the memory, None until it may have one.
    `texts` are the samples whose first tokens are drawn here, none where nobody wants them: `first_tokens`.
    `on_done` gets the prompt and its caches, on the engine thread, once they hold all the tokens;
    `on_fail` gets what went wrong instead.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        held: Sequence[PageArray],
        pages: MlxPrefill,
        *,
        room: int,
        share: Share | None = None,
        texts: Sequence[Text] = (),
        on_done: Callable[[Prompt, list[Any]], None],
        on_fail: Callable[[CrossfillError], None],
    ) -> None:
        self.pages = pages
        self.room = room
        self.share = share
        self.on_done = on_done
        self.on_fail = on_fail
        self.caches: list[Tap] | None = None
        self.first_tokens: tuple[int, ...] = ()
        self.first_logprobs: tuple[TokenLogprob, ...] = ()
        self._texts = texts
        self._tokens = tokens
        self._held = held
        self._at = len(held) * PAGE_TOKENS

    @property
    def done(self) -> bool:
        return self._at == len(self._tokens)

    def begin(self, model: Model) -> list[Tap]:
        """Allocate the caches, once."""
        if self.caches is None:
            self.caches = kv.start(model, self.room, self._held)
            self._held = ()
        return self.caches

    def step(self, model: Model, chunk_tokens: int) -> Chunk:
        """Compute the next `chunk_tokens` tokens, or what is left of them."""
        caches = self.begin(model)
        count = min(chunk_tokens, len(self._tokens) - self._at)
        # The logits are not evaluated, so neither they nor what only they need of the last layer is computed, but for
        # those of the last token where somebody wants the next one.
        logits = model.module(mx.array([self._tokens[self._at : self._at + count]]), cache=caches)
        layers = [cache.take() for cache in caches]
        _require_shape(model, layers, count)
        pages = kv.as_pages(layers)
        mx.eval(pages, [(cache.keys, cache.values) for cache in caches])
        chunk = Chunk(self._at, count, pages)
        self._at += count
        if self._texts and self.done:
            self._draw(logits[:, -1, :])
        return chunk

    def _draw(self, logits: Any) -> None:
        """Each text's first token from the one row of `logits` `(1, vocab)`."""
        samplers = [Sampler(text.sampling, text.seed) for text in self._texts]
        changes = [text.change() for text in self._texts]
        drawn = draw(samplers, [self._at] * len(samplers), mx.repeat(logits, len(samplers), axis=0), changes)
        self.first_tokens = tuple(drawn.tolist())
        if (count := self._texts[0].sampling.logprobs) is not None:
            reports = [report(logits, drawn[at : at + 1], count) for at in range(len(samplers))]
            self.first_logprobs = tuple(map(Report.read, reports, self.first_tokens))


def _require_shape(model: Model, layers: list[tuple[Any, Any]], tokens: int) -> None:
    expected = (1, model.shape.kv_heads, tokens, model.shape.head_dim)
    for pair in layers:
        for array in pair:
            if array.shape != expected or array.dtype != model.dtype:
                raise EngineError(f"the model computed KV of {array.dtype} {array.shape}, not {model.dtype} {expected}")
