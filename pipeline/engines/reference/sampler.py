"""Sampling: one row of logits to one token id, and how likely the model found it.

Order: what the text lets come next (`engines.text.Change`), temperature, then min_p (against the best), top_k, then
top_p (over what is left, renormalised), then one draw by inverse CDF in order of falling probability (ties: lower id
first). The draw for the token at absolute position p is the first uniform of Philox(key=seed, counter=p): it depends on
nothing but seed and position, so a request resumed elsewhere as prompt + emitted tokens continues with the very draws
it would have had.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.text import Text
from pipeline.logprob import TokenLogprob
from pipeline.request import Sampling

_SEED_SPACE = 1 << 64


def draw(logits: NDArray[np.float32], text: Text) -> int:
    """The next token of `text` from the model's logits `(vocab,)`."""
    change = text.change()
    shaped = logits if change is None else change.apply(logits)
    return sample(shaped, text.sampling, text.seed, text.position)


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
    probs = np.exp(scaled - scaled[0])
    kept = max(1, int(np.count_nonzero(probs >= sampling.min_p)))  # the best has 1 here (Nguyen et al. 2024)
    kept = min(kept, sampling.top_k or kept)
    order, probs = order[:kept], probs[:kept] / probs[:kept].sum()
    if sampling.top_p < 1:
        # A token stays while the mass before it is short of top_p: the smallest set that reaches it, at least one.
        kept = max(1, int(np.count_nonzero(np.cumsum(probs) - probs < sampling.top_p)))
        order, probs = order[:kept], probs[:kept] / probs[:kept].sum()
    return order, probs


def report(logits: NDArray[np.float32], token_id: int, count: int | None) -> tuple[TokenLogprob, ...] | None:
    """How likely the model found `token_id`, beside the `count` likeliest; None where nobody asked (`count` None)."""
    if count is None:
        return None
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    top = np.argsort(-logits, kind="stable")[:count]
    return (TokenLogprob(token_id, float(logprobs[token_id]), tuple((int(i), float(logprobs[i])) for i in top)),)


def _uniform(seed: int, position: int) -> float:
    return float(np.random.Generator(np.random.Philox(key=seed % _SEED_SPACE, counter=position)).random())
