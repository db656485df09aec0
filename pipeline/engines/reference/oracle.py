"""Oracle: what a handoff must yield, computed without any engine thread, page or batch.

A split run is the decode engine's own run at the split a handoff makes: the KV of all prompt tokens but the last,
then the last one alone, then greedy tokens. Tests compare engines with it, as far as its margins allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.reference.model import KvCache, Model


class SplitRun(NamedTuple):
    """Greedy `tokens`, and for each the logit of the best minus that of the second best."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


def split_run(model: Model, token_ids: Sequence[int], count: int, *, chunk_tokens: int = 256) -> SplitRun:
    """`count` greedy tokens after `token_ids` (at least one), stop ids ignored."""
    cache, logits = split_prefill(model, token_ids, count, chunk_tokens=chunk_tokens)
    tokens: list[int] = []
    margins: list[float] = []
    for step in range(count):
        second, best = np.partition(logits, -2)[-2:]
        tokens.append(int(np.argmax(logits)))
        margins.append(float(best - second))
        if step + 1 < count:
            logits = model.logits(tokens[-1:], cache)
    return SplitRun(tuple(tokens), tuple(margins))


def split_prefill(
    model: Model, token_ids: Sequence[int], room: int, *, chunk_tokens: int = 256
) -> tuple[KvCache, NDArray[np.float32]]:
    """The cache of the whole prompt, with `room` more tokens of capacity, and the logits after its last token."""
    cache = KvCache(model.shape, len(token_ids) + room)
    body = token_ids[:-1]
    for at in range(0, len(body), chunk_tokens):
        model.prefill(body[at : at + chunk_tokens], cache)
    return cache, model.logits(token_ids[-1:], cache)
