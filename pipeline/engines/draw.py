"""Draw: one row of logits to the next token of a text, in PyTorch. What vLLM's and SGLang's requests share.

Gumbel-max (Gumbel 1954): argmax of logits + Gumbel noise is a draw from the softmax. The noise is a pure function of
(seed, absolute position): the same text whatever the batch, the chunks or a preemption, and a request continued
elsewhere with its emitted tokens goes on with the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.engines.text import Change, Text
from pipeline.logprob import TokenLogprob

_SEED_SPACE = 1 << 64


def report(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """How likely the model found each of `token_ids`, of its own `logits` `(vocab,)`, beside the `count` likeliest."""
    found = logits.float().log_softmax(-1)
    values, ids = found.topk(count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return tuple(TokenLogprob(token_id, float(found[token_id]), top) for token_id in token_ids)


def report_rows(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
    """As `report`, one token for each row of `logits` `(rows, vocab)`; `counts` may differ."""
    found = logits.float().log_softmax(-1)
    chosen = found.gather(1, token_ids.long()[:, None])[:, 0]
    values, ids = found.topk(max(counts))
    rows = zip(token_ids.tolist(), chosen.tolist(), ids.tolist(), values.tolist(), counts, strict=True)
    return [
        TokenLogprob(token, value, tuple(zip(top[:count], likeliest[:count], strict=True)))
        for token, value, top, likeliest, count in rows
    ]


def draw_for(text: Text, logits: torch.Tensor) -> torch.Tensor:
    """Logits `(vocab,)` whose argmax is the next token of `text`."""
    change, sampling = text.change(), text.sampling
    changed = logits if change is None else apply(change, logits)
    if sampling.temperature == 0:
        return changed
    return draw(
        changed,
        position=text.position,
        seed=text.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )


def apply(change: Change, logits: torch.Tensor) -> torch.Tensor:
    """`change` to a copy of `logits` `(vocab,)`, in FP32."""
    row = logits.to(torch.float32, copy=True)

    def on_device(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(row.device)

    row[on_device(change.biased)] += on_device(change.bias)
    repeated = on_device(change.repeated)
    found = row[repeated]
    row[repeated] = torch.where(found > 0, found / change.repetition, found * change.repetition)
    row[on_device(change.sampled)] -= on_device(change.penalty)
    if change.allowed is not None:
        row.masked_fill_(~on_device(change.allowed), -torch.inf)
    row[on_device(change.forbidden)] = -torch.inf
    return row


def draw(
    logits: torch.Tensor, *, position: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> torch.Tensor:
    """Logits `(vocab,)` whose argmax is the seeded draw at `position`.

    Order: temperature, min-p, top-k, top-p, noise.
    """
    scores = _keep_top_p(_keep_top_k(_keep_min_p(logits.float() / temperature, min_p), top_k), top_p)
    bits = np.random.Philox(key=seed % _SEED_SPACE, counter=position)
    noise = np.random.Generator(bits).gumbel(size=scores.shape[0]).astype(np.float32)
    return scores + torch.from_numpy(noise).to(scores.device)


def _keep_min_p(scores: torch.Tensor, min_p: float) -> torch.Tensor:
    """Scores less likely than `min_p` times the best become -inf (Nguyen et al. 2024)."""
    if min_p <= 0:
        return scores
    return scores.masked_fill(scores < scores.max() + math.log(min_p), -torch.inf)


def _keep_top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """All but the `top_k` highest scores become -inf; 0 keeps all."""
    if not 0 < top_k < scores.shape[0]:
        return scores
    kept = torch.full_like(scores, -torch.inf)
    best = scores.topk(top_k).indices
    kept[best] = scores[best]
    return kept


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of best tokens whose probability reaches `top_p` stays (Holtzman et al. 2019), never none."""
    if top_p >= 1:
        return scores
    ordered, order = scores.sort(descending=True, stable=True)
    probabilities = ordered.softmax(0)
    outside = probabilities.cumsum(0) - probabilities >= top_p
    outside[0] = False
    kept = scores.clone()
    kept[order[outside]] = -torch.inf
    return kept
