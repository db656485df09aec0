"""Order: what the plug-in is told of a request's draws, and what it tells of them.

It rides in the one field of SGLang's sampling parameters that SGLang itself does not read. The plug-in draws what
SGLang cannot draw by our definitions (`engines.text`), and reports logprobs of the model's own distribution.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipeline import logprob
from pipeline import request as requests
from pipeline.logprob import TokenLogprob
from pipeline.request import Request, Sampling

_KEY = "crossfill"


class First(NamedTuple):
    """What P drew behind the prompt: a token for each sample, and their logprobs where the request asks for any."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


def drawn_by_us(request: Request) -> bool:
    """Whether D's tokens are drawn by the plug-in. SGLang draws what has temperature, top-k, top-p and a seed only."""
    sampling = request.sampling
    if any(request.again):
        return True
    shaped = sampling.penalised or bool(sampling.logit_bias) or sampling.min_tokens > 0
    return shaped or sampling.grammar is not None or (sampling.min_p > 0 and sampling.temperature > 0)


def write(request: Request) -> dict[str, str]:
    """As SGLang's `custom_params`. SGLang has the token ids itself."""
    return {_KEY: requests.encode(replace(request, token_ids=()))}


def read(params: Mapping[str, Any] | None, token_ids: Sequence[int]) -> Request | None:
    """None for a request without an order."""
    text = (params or {}).get(_KEY)
    return None if text is None else replace(requests.decode(text), token_ids=tuple(token_ids))


def pack(first: First) -> bytes:
    return struct.pack(f"<{len(first.token_ids)}I", *first.token_ids) + logprob.pack(first.logprobs)


def unpack(data: bytes, sampling: Sampling) -> First:
    token_ids = struct.unpack_from(f"<{sampling.n}I", data)
    if sampling.logprobs is None:
        return First(token_ids)
    return First(token_ids, logprob.unpack(data[4 * sampling.n :], token_ids, sampling.logprobs))
