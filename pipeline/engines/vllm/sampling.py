"""Sampling: our request as vLLM's `SamplingParams`, and the draws that we make ourselves.

Every field is explicit, so that no default of vLLM or of a `generation_config.json` leaks in.

vLLM draws what is plain: unseeded, and nothing asked beside temperature and filters. All else runs greedy in vLLM over
logits that `Draws` has already changed (`engines.text.Change`), filtered and perturbed (Gumbel-max, Gumbel 1954; argmax
of logits + Gumbel noise is a draw from the softmax). The reasons:

- vLLM's own per-request seed keeps a generator whose state depends on how the prompt was cut into chunks, and on a CPU
  it raises out of the engine's step when a seeded prompt is chunked. Our noise is a pure function of (seed, absolute
  position): the same text whatever the batch, the chunks or a preemption, and a request continued elsewhere with its
  emitted tokens goes on with the same draws.
- vLLM applies penalties behind all logits processors, so behind our temperature, and a grammar before it takes the
  logprobs; its grammars also want a tokenizer in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from pipeline.engines.draw import draw_for, report
from pipeline.engines.text import Text
from pipeline.engines.vllm.exchange import VllmTicket, find
from pipeline.engines.vllm.export import Export
from pipeline.errors import CrossfillError
from pipeline.logprob import TokenLogprob

_DRAW = "crossfill_draw"
_TICKET = "kv_transfer_params"


def for_decode(text: Text, ticket: str) -> SamplingParams:
    """How D samples: stop ids are emitted and end the request, `ignore_eos` because they already contain EOS."""
    sampling = text.sampling
    ours = text.changes or (sampling.seed is not None and sampling.temperature > 0)
    return _params(
        ticket,
        temperature=0.0 if ours else sampling.temperature,
        top_p=1.0 if ours else sampling.top_p,
        top_k=0 if ours else sampling.top_k,
        min_p=0.0 if ours else sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sorted(text.stops),
        logprobs=sampling.logprobs,
        draw=ours,
    )


def for_prefill(ticket: Export) -> SamplingParams:
    """P draws one token: as the request says where D wants it, else a greedy one that is thrown away."""
    return _params(ticket.key, draw=bool(ticket.texts))


def _params(
    ticket: str,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_tokens: int = 1,
    stop_token_ids: Sequence[int] = (),
    logprobs: int | None = None,
    draw: bool,
) -> SamplingParams:
    return SamplingParams(
        n=1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=None,
        stop=None,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        max_tokens=max_tokens,
        min_tokens=0,
        logprobs=logprobs,
        prompt_logprobs=None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={_TICKET: {"ticket": ticket}, _DRAW: ticket if draw else None},
    )


def logprobs(found: Sequence[Mapping[int, Any]], token_ids: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """From vLLM's own, which are of the raw logits too: per token the drawn one, then the `count` likeliest."""
    return tuple(_logprob(one, token_id, count) for one, token_id in zip(found, token_ids, strict=True))


def _logprob(found: Mapping[int, Any], token_id: int, count: int) -> TokenLogprob:
    listed = [other for other in found if len(found) == count or other != token_id]
    top = sorted(listed, key=lambda other: int(found[other].rank))
    return TokenLogprob(token_id, float(found[token_id].logprob), tuple((i, float(found[i].logprob)) for i in top))


class Draws(AdapterLogitsProcessor):
    """vLLM's logits-processor plug-in: the rows of requests that draw here. What fails is that request's alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._exchange = find(vllm_config.kv_transfer_config.kv_connector_extra_config["exchange"])

    def is_argmax_invariant(self) -> bool:
        return False  # it decides the token

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        key = (params.extra_args or {}).get(_DRAW)
        if key is None:
            return None
        ticket = self._exchange.by_key[key]

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            try:
                return (
                    _draw_first(ticket, logits)
                    if isinstance(ticket, Export)
                    else _draw_next(ticket, output_ids, logits)
                )
            except CrossfillError as error:
                ticket.fail(error)
                return logits

        return process


def _draw_next(ticket: VllmTicket, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    (text,) = ticket.texts
    for token in output_ids[len(text.tokens) :]:
        text.push(token)
    return draw_for(text, logits)


def _draw_first(ticket: Export, logits: torch.Tensor) -> torch.Tensor:
    """Every sample's first token from the one row; while chunks are missing it is drawn in vain."""
    rows = [draw_for(text, logits) for text in ticket.texts]
    token_ids = tuple(int(row.argmax()) for row in rows)
    count = ticket.request.sampling.logprobs
    ticket.draw(token_ids, () if count is None else report(logits, token_ids, count))
    return rows[0]
