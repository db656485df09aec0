"""Sampling: our request as vLLM's `SamplingParams`, and the seeded draw.

Every field is explicit, so that no default of vLLM or of a `generation_config.json` leaks in.

vLLM's own per-request seed keeps a generator whose state depends on how the prompt was cut into chunks, and on a CPU
it raises out of the engine's step when a seeded prompt is chunked. So a seeded request runs greedy in vLLM over logits
that `SeededDraw` has already filtered and perturbed (Gumbel-max, Gumbel 1954; argmax of logits + Gumbel noise is a draw
from the softmax). The noise is a pure function of (seed, absolute position): the same text whatever the batch,
the chunks or a preemption, and a request continued elsewhere with its emitted tokens goes on with the same draws.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from pipeline.request import Request, Sampling

_DRAW = "crossfill_draw"
_TICKET = "kv_transfer_params"


def for_decode(sampling: Sampling, ticket: str) -> SamplingParams:
    """How D samples: stop ids are emitted and end the request, `ignore_eos` because they already contain EOS."""
    extra: dict[str, Any] = {}
    seeded = sampling.seed is not None and sampling.temperature > 0
    if seeded:
        extra[_DRAW] = {
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    return _params(
        ticket,
        temperature=0.0 if seeded else sampling.temperature,
        top_p=1.0 if seeded else sampling.top_p,
        top_k=0 if seeded else sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        extra=extra,
    )


def for_prefill(request: Request, ticket: str) -> SamplingParams:
    """P draws one token: as the request says where D wants it, else a greedy one that is thrown away."""
    if request.first_token:
        return for_decode(replace(request.sampling, max_tokens=1), ticket)
    return _params(ticket, temperature=0.0, top_p=1.0, top_k=0, max_tokens=1, stop_token_ids=[], extra={})


def _params(
    ticket: str,
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    max_tokens: int,
    stop_token_ids: list[int],
    extra: dict[str, Any],
) -> SamplingParams:
    return SamplingParams(
        n=1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=0.0,
        seed=None,
        stop=None,
        stop_token_ids=stop_token_ids,
        ignore_eos=True,
        max_tokens=max_tokens,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={_TICKET: {"ticket": ticket}, **extra},
    )


class SeededDraw(AdapterLogitsProcessor):
    """vLLM's logits-processor plug-in: applies `draw` to the rows of seeded requests."""

    def is_argmax_invariant(self) -> bool:
        return False  # it decides the token

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        wish = (params.extra_args or {}).get(_DRAW)
        if wish is None:
            return None

        def process(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return draw(logits, position=len(prompt_ids) + len(output_ids), **wish)

        return process


def draw(
    logits: torch.Tensor, *, position: int, seed: int, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """Logits `(vocab,)` whose argmax is the seeded draw at `position`. Order: temperature, top-k, top-p, noise."""
    scores = _keep_top_p(_keep_top_k(logits.float() / temperature, top_k), top_p)
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    noise = np.random.Generator(bits).gumbel(size=scores.shape[0]).astype(np.float32)
    return scores + torch.from_numpy(noise).to(scores.device)


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
