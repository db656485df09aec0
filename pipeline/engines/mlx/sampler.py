"""Sampling: logits of one request to its next token, inside MLX's graph.

Order of the filters: temperature, top_k, top_p (over what top_k left), then one draw by inverse CDF in order of
falling probability. The draw of the token at absolute position p is the first uniform of Philox(key=seed,
counter=p), as in every engine of ours: a request resumed elsewhere as prompt + emitted tokens draws on as it would
have. No global random state is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

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
    if sampling.top_k > 0:
        order, scaled = order[:, : sampling.top_k], scaled[:, : sampling.top_k]
    mass = mx.softmax(scaled, axis=-1, precise=True)
    if sampling.top_p < 1:
        before = mx.cumsum(mass, axis=-1, inclusive=False)
        best = mx.arange(mass.shape[-1]) == 0  # stays even where top_p is 0
        mass = mx.where((before < sampling.top_p) | best, mass, 0.0)
    return order, mass


def draw(samplers: Sequence[Sampler], positions: Sequence[int], logits: Any) -> Any:
    """One token for each row of `logits` `(rows, vocab)`."""
    if all(sampler.greedy for sampler in samplers):
        return greedy(logits)
    rows = [
        sampler(logits[row : row + 1], position)
        for row, (sampler, position) in enumerate(zip(samplers, positions, strict=True))
    ]
    return mx.concatenate(rows)
