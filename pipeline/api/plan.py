"""Plan: from a validated ask and its token ids to one prompt: the request for the engines, and how its text is made."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from anyio import to_thread
from fastapi import Request as HttpRequest

from pipeline import grammar
from pipeline.api import gate
from pipeline.api.answer import Pace, Teller, Telling
from pipeline.api.chunk import Counting
from pipeline.api.output import Output
from pipeline.api.relay import Prompt
from pipeline.api.schemas import Ask
from pipeline.api.served import Served
from pipeline.api.stop import StopMatcher
from pipeline.api.text import Detokeniser
from pipeline.errors import InvalidParameterError
from pipeline.request import Request, Sampling

_LIGHT_BYTES = 2048  # of a body: tokenising takes about 0.6 us a byte
_HEAVY = ("response_format", "tools", "chat_template_kwargs")
T = TypeVar("T")


async def beside(http: HttpRequest, ask: Ask, make: Callable[[], T]) -> T:
    """What `make` makes of a prompt: in a thread, where tokenising it or reading a grammar may take a while. A short
    text alone takes less than the thread does."""
    size = http.headers.get("content-length", "")
    heavy = any(getattr(ask, name, None) for name in _HEAVY)
    if size.isdigit() and int(size) <= _LIGHT_BYTES and not heavy:
        return make()
    return await to_thread.run_sync(make)


def prompt(
    ask: Ask,
    served: Served,
    token_ids: Sequence[int],
    max_tokens: int,
    *,
    salt: str,
    param: str,
    form: Form | None = None,
) -> Prompt:
    """`max_tokens` is cut to what the context window leaves; `param` is where the prompt came from.

    Raises ContextLengthError, InvalidParameterError.
    """
    if not token_ids:
        raise InvalidParameterError(param, f"`{param}` holds no tokens.")
    require_vocabulary(token_ids, served, param)
    form = form or _form(ask)
    if form:
        grammar.check(form.grammar, form.param)
    max_tokens = min(max_tokens, served.room(len(token_ids), param))
    sampling = _sampling(ask, served, max_tokens, form.grammar if form else None)
    request = Request(uuid.uuid4().hex, tuple(token_ids), sampling, salt)
    outputs = tuple(output(ask, served, token_ids) for _ in range(ask.samples))
    return Prompt(request, outputs, len(token_ids), params=_params(ask, form))


class Form(NamedTuple):
    """A grammar that the text must follow, and the parameter that asked for it."""

    grammar: str
    param: str


def _form(ask: Ask) -> Form | None:
    text = ask.response_format.grammar if ask.response_format else None
    return Form(text, "response_format") if text else None


def _params(ask: Ask, form: Form | None) -> dict[str, str]:
    """Feature -> the parameter that asked for it."""
    changed = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    penalty = next((name for name, off in changed.items() if getattr(ask, name) not in (None, off)), "penalties")
    return {"penalties": penalty, "grammar": form.param if form else "grammar"}


def output(ask: Ask, served: Served, token_ids: Sequence[int]) -> Output:
    include = bool(ask.include_stop_str_in_output)
    detokeniser = Detokeniser(served.text, token_ids, skip_special_tokens=ask.skip_special_tokens is not False)
    return Output(detokeniser, StopMatcher(ask.stops, include=include), include_stop=include)


def salt(http: HttpRequest, ask: Ask) -> str:
    """Keeps tenants' pages apart: hex SHA-256 over the API key and the client's own salt."""
    return hashlib.sha256(f"{gate.bearer(http.headers)}\0{ask.cache_salt or ''}".encode()).hexdigest()


def telling(http: HttpRequest, ask: Ask, teller: Teller, pace: Pace) -> Telling:
    return Telling(teller, pace, stream=bool(ask.stream), traced=http.headers.get("x-crossfill-trace") == "1")


def counting(ask: Ask) -> Counting:
    """What a stream says about usage."""
    options = ask.stream_options
    return Counting(
        last=bool(options and options.include_usage), running=bool(options and options.continuous_usage_stats)
    )


def _sampling(ask: Ask, served: Served, max_tokens: int, grammar_text: str | None) -> Sampling:
    """Explicit values for all: null is OpenAI's default, and what switches nothing on is normalised to off."""
    vocab_size = served.contract.vocab_size
    stop_ids = tuple(dict.fromkeys(ask.stop_token_ids or ()))
    require_vocabulary(stop_ids, served, "stop_token_ids")
    biases = {int(token_id): bias for token_id, bias in (ask.logit_bias or {}).items()}
    require_vocabulary(tuple(biases), served, "logit_bias")
    min_tokens = ask.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"`min_tokens` must not exceed the {max_tokens} tokens that may be generated."
        raise InvalidParameterError("min_tokens", message)
    ends = () if ask.ignore_eos else served.eos_token_ids
    return Sampling(
        max_tokens=max_tokens,
        temperature=_or(ask.temperature, 1.0),
        top_p=_or(ask.top_p, 1.0),
        top_k=ask.top_k if ask.top_k and 0 < ask.top_k < vocab_size else 0,
        seed=ask.seed,
        stop_token_ids=tuple(dict.fromkeys((*ends, *stop_ids))),
        min_p=_or(ask.min_p, 0.0),
        presence_penalty=_or(ask.presence_penalty, 0.0),
        frequency_penalty=_or(ask.frequency_penalty, 0.0),
        repetition_penalty=_or(ask.repetition_penalty, 1.0),
        logit_bias=tuple(sorted((token_id, float(bias)) for token_id, bias in biases.items() if bias)),
        logprobs=ask.alternatives,
        min_tokens=min_tokens,
        grammar=grammar_text,
        n=ask.samples,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def require_vocabulary(token_ids: Sequence[int], served: Served, param: str) -> None:
    """Raises InvalidParameterError for an id that the model does not have: engines may die of one."""
    if token_ids and max(token_ids) >= served.contract.vocab_size:
        raise InvalidParameterError(param, f"Token ids of `{param}` must be below {served.contract.vocab_size}.")
