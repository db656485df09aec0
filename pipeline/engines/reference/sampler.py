"""Sampling: one row of logits to one token id.

Order of the filters: temperature, then top_k, then top_p (over what top_k left, renormalised), then one draw by
inverse CDF in order of falling probability (ties: lower id first). The draw for the token at absolute position p
is the first uniform of Philox(key=seed, counter=p): it depends on nothing but seed and position, so a request
resumed elsewhere as prompt + emitted tokens continues with the very draws it would have had.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.request import Sampling

_SEED_SPACE = 1 << 64


def sample(logits: NDArray[np.float32], sampling: Sampling, seed: int, position: int) -> int:
    """The next token id from `logits` `(vocab,)`; `position` is where that token will stand (0-based).

    `seed` is used instead of `sampling.seed`, which may be None. Temperature 0 is greedy: the lowest id of the best.
    """
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    order, probs = distribution(logits, sampling)
    cumulative = np.cumsum(probs)
    drawn = _uniform(seed, position) * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, drawn, side="right")), len(order) - 1)])


def distribution(logits: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Token ids by falling probability and their probabilities (sum 1), after all filters. Temperature > 0."""
    order = np.argsort(-logits, kind="stable")
    scaled = logits[order].astype(np.float64) / sampling.temperature
    if sampling.top_k > 0:
        order, scaled = order[: sampling.top_k], scaled[: sampling.top_k]
    probs = np.exp(scaled - scaled[0])
    probs /= probs.sum()
    if sampling.top_p < 1:
        # A token stays while the mass before it is short of top_p: the smallest set that reaches it, at least one.
        kept = max(1, int(np.count_nonzero(np.cumsum(probs) - probs < sampling.top_p)))
        order, probs = order[:kept], probs[:kept] / probs[:kept].sum()
    return order, probs


def _uniform(seed: int, position: int) -> float:
    return float(np.random.Generator(np.random.Philox(key=seed % _SEED_SPACE, counter=position)).random())
