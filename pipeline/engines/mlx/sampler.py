"""Sampling: logits of one request to its next token, inside MLX's graph.

Order: what the text lets come next (`engines.text.Change`), temperature, min_p (against the best), top_k, top_p (over
what is left), then one draw by inverse CDF in order of falling probability. The draw of the token at absolute position
p is the first uniform of Philox(key=seed, counter=p), as in every engine of ours: a request resumed elsewhere as
prompt + emitted tokens draws on as it would have. No global random state is touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from pipeline.engines.text import Change
from pipeline.logprob import TokenLogprob
from pipeline.request import Sampling

_SEED_SPACE = 1 << 64


def greedy(logits: Any) -> Any:
    """`(rows, vocab)` to `(rows,)`: the best id, the lowest where several are."""
    return mx.argmax(logits, axis=-1)


class Sampler:
    """Draws the tokens of one request. `seed` is used instead of `sampling.seed`, which may be None."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.greedy = sampling.temperature == 0
        self._sampling = sampling
        self._seed = seed % _SEED_SPACE

    def __call__(self, logits: Any, position: int) -> Any:
        """`logits` `(1, vocab)` to `(1,)`; `position` is where that token will stand, 0-based."""
        if self.greedy:
            return greedy(logits)
        order, mass = _filter(logits.astype(mx.float32), self._sampling)
        cumulative = mx.cumsum(mass, axis=-1)
        passed = (cumulative <= self._uniform(position) * cumulative[:, -1:]).sum(axis=-1, keepdims=True)
        # Rounding may leave the last sums short of the total: an id without mass must not be drawn for that.
        chosen = mx.minimum(passed, (mass > 0).sum(axis=-1, keepdims=True) - 1)
        return mx.take_along_axis(order, chosen, axis=-1)[:, 0]

    def _uniform(self, position: int) -> float:
        return float(np.random.Generator(np.random.Philox(key=self._seed, counter=position)).random())


def _filter(logits: Any, sampling: Sampling) -> tuple[Any, Any]:
    """Ids by falling probability, and their mass: unnormalised, zero where a filter took them out."""
    order = mx.argsort(-logits, axis=-1)
    scaled = mx.take_along_axis(logits, order, axis=-1) / sampling.temperature
    if sampling.min_p > 0:
        scaled = mx.where(scaled - scaled[:, :1] >= math.log(sampling.min_p), scaled, -mx.inf)
    if sampling.top_k > 0:
        order, scaled = order[:, : sampling.top_k], scaled[:, : sampling.top_k]
    mass = mx.softmax(scaled, axis=-1, precise=True)
    if sampling.top_p < 1:
        before = mx.cumsum(mass, axis=-1, inclusive=False)
        best = mx.arange(mass.shape[-1]) == 0  # stays even where top_p is 0
        mass = mx.where((before < sampling.top_p) | best, mass, 0.0)
    return order, mass


def draw(
    samplers: Sequence[Sampler], positions: Sequence[int], logits: Any, changes: Sequence[Change | None] = ()
) -> Any:
    """One token for each row of `logits` `(rows, vocab)`, each changed first as its text asks."""
    changes = changes or [None] * len(samplers)
    if all(sampler.greedy for sampler in samplers) and not any(changes):
        return greedy(logits)
    rows = [logits[row : row + 1] for row in range(len(samplers))]
    changed = [one if change is None else apply(change, one) for one, change in zip(rows, changes, strict=True)]
    drawn = [sampler(*pair) for sampler, *pair in zip(samplers, changed, positions, strict=True)]
    return mx.concatenate(drawn)


def apply(change: Change, logits: Any) -> Any:
    """`change` to one row `(1, vocab)`, in FP32."""
    row = logits[0].astype(mx.float32)
    if len(change.biased):
        ids = mx.array(change.biased)
        row[ids] = row[ids] + mx.array(change.bias)
    if len(change.repeated):
        ids = mx.array(change.repeated)
        found = row[ids]
        row[ids] = mx.where(found > 0, found / change.repetition, found * change.repetition)
    if len(change.sampled):
        ids = mx.array(change.sampled)
        row[ids] = row[ids] - mx.array(change.penalty)
    if change.allowed is not None:
        row = mx.where(mx.array(change.allowed), row, -mx.inf)
    if len(change.forbidden):
        row[mx.array(change.forbidden)] = -mx.inf
    return row[None]


class Report(NamedTuple):
    """Logprobs inside the graph: of the drawn token `(1, 1)`, and of the likeliest `(1, count)`."""

    chosen: Any
    top_ids: Any
    top: Any

    def read(self, token_id: int) -> TokenLogprob:
        top = zip(self.top_ids.tolist()[0], self.top.tolist()[0], strict=True) if self.top.size else ()
        return TokenLogprob(token_id, self.chosen.item(), tuple(top))


def report(logits: Any, drawn: Any, count: int) -> Report:
    """How likely the model found the `drawn` token `(1,)`: of its own `logits` `(1, vocab)`, unchanged."""
    wide = logits.astype(mx.float32)
    logprobs = wide - mx.logsumexp(wide, axis=-1, keepdims=True)
    top_ids = mx.argsort(-logprobs, axis=-1)[:, :count]
    return Report(
        mx.take_along_axis(logprobs, drawn[:, None], axis=-1),
        top_ids,
        mx.take_along_axis(logprobs, top_ids, axis=-1),
    )
