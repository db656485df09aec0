"""Plan: from a validated ask and its token ids to one choice: the request for the engines, and how its text is made."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence

from fastapi import Request as HttpRequest

from pipeline.api import gate
from pipeline.api.answer import Pace, Shape, Telling
from pipeline.api.output import Output
from pipeline.api.relay import Choice
from pipeline.api.schemas import Ask
from pipeline.api.served import Served
from pipeline.api.stop import StopMatcher
from pipeline.api.text import Detokeniser
from pipeline.errors import InvalidParameterError
from pipeline.request import Request, Sampling


def choice(ask: Ask, served: Served, token_ids: Sequence[int], max_tokens: int, *, salt: str, param: str) -> Choice:
    """`max_tokens` is cut to what the context window leaves. Raises ContextLengthError, InvalidParameterError."""
    _require_vocabulary(token_ids, served, param)
    room = served.room(len(token_ids), param)
    sampling = _sampling(ask, served, min(max_tokens, room))
    request = Request(uuid.uuid4().hex, tuple(token_ids), sampling, salt)
    return Choice(request, output(ask, served, token_ids), len(token_ids))


def output(ask: Ask, served: Served, token_ids: Sequence[int]) -> Output:
    include = bool(ask.include_stop_str_in_output)
    detokeniser = Detokeniser(served.text, token_ids, skip_special_tokens=ask.skip_special_tokens is not False)
    return Output(detokeniser, StopMatcher(ask.stops, include=include), include_stop=include)


def salt(http: HttpRequest, ask: Ask) -> str:
    """Keeps tenants' pages apart: hex SHA-256 over the API key and the client's own salt."""
    return hashlib.sha256(f"{gate.bearer(http.headers)}\0{ask.cache_salt or ''}".encode()).hexdigest()


def telling(http: HttpRequest, ask: Ask, shape: Shape, pace: Pace) -> Telling:
    options = ask.stream_options
    return Telling(
        shape,
        pace,
        stream=bool(ask.stream),
        usage=bool(options and options.include_usage),
        running_usage=bool(options and options.continuous_usage_stats),
        traced=http.headers.get("x-crossfill-trace") == "1",
    )


def _sampling(ask: Ask, served: Served, max_tokens: int) -> Sampling:
    """Explicit values for all: null is OpenAI's default, and what switches nothing on is normalised to off."""
    vocab_size = served.contract.vocab_size
    stop_ids = tuple(dict.fromkeys(ask.stop_token_ids or ()))
    if any(token_id >= vocab_size for token_id in stop_ids):
        raise InvalidParameterError("stop_token_ids", f"`stop_token_ids` must be below {vocab_size}.")
    ends = () if ask.ignore_eos else served.eos_token_ids
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if ask.temperature is None else float(ask.temperature),
        top_p=1.0 if ask.top_p is None else float(ask.top_p),
        top_k=ask.top_k if ask.top_k and 0 < ask.top_k < vocab_size else 0,
        seed=ask.seed,
        stop_token_ids=tuple(dict.fromkeys((*ends, *stop_ids))),
    )


def _require_vocabulary(token_ids: Sequence[int], served: Served, param: str) -> None:
    if not token_ids:
        raise InvalidParameterError(param, f"`{param}` holds no tokens.")
    if max(token_ids) >= served.contract.vocab_size:
        raise InvalidParameterError(param, f"Token ids of `{param}` must be below {served.contract.vocab_size}.")
