"""Request: what both engines need to know of one prompt. Token ids, never text.

Made once by the API (which tokenises once), stored in the ledger as JSON, rebuilt by P and D. The engines get
explicit values for every sampling field: an engine's own default never leaks in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import msgspec

# What an engine may lack. Everything else of a Sampling every engine can do.
FEATURES: Final = ("logprobs", "penalties", "min_p", "logit_bias", "min_tokens", "grammar", "n")
MAX_LOGPROBS: Final = 20
MAX_SAMPLES: Final = 8
_RESUMED: Final = ("answered", "again")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How D draws tokens. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off; `seed` None is
    unseeded.

    Penalties are OpenAI's (presence, frequency: over what was sampled) and CTRL's (repetition: over prompt and
    samples; 1 is off). `logit_bias` is (token id, what is added to its logit). `logprobs`: None for none, else how many
    of the likeliest tokens are reported beside each sampled one. No stop id is sampled before `min_tokens` tokens.
    `grammar` is a text of `pipeline.grammar`. `n` samples of the one prompt are drawn, the i-th with seed + i.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    min_tokens: int = 0
    grammar: str | None = None
    n: int = 1

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def needs(self) -> frozenset[str]:
        """The FEATURES that the engines must have for this."""
        asked = {
            "logprobs": self.logprobs is not None,
            "penalties": self.penalised,
            "min_p": self.min_p > 0,
            "logit_bias": bool(self.logit_bias),
            "min_tokens": self.min_tokens > 0,
            "grammar": self.grammar is not None,
            "n": self.n > 1,
        }
        return frozenset(name for name in FEATURES if asked[name])


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt (`token_ids`, at least one) and how to continue it.

    `stop_token_ids` of the sampling already contains the model's end-of-sequence ids unless the client asked
    to ignore them: D stops on these ids and emits the one it stopped on. `first_token`: D's engine cannot compute a
    prompt token, so it gets the KV of all of them, and P draws the first token with this request's own sampling.

    The last two are of a continuation (`resumed`); the record has the client's request. `answered`: how many of the
    last `token_ids` are answer, for the grammar and the penalties. `again`: what each of several samples has said.
    """

    handoff_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    salt: str = ""
    first_token: bool = False
    answered: int = 0
    again: tuple[tuple[int, ...], ...] = ()

    @property
    def transfer_tokens(self) -> int:
        """Tokens whose KV D needs from outside: all but the last, where D computes that one itself."""
        return len(self.token_ids) - (not self.first_token)


def resumed(request: Request, said: Sequence[Sequence[int]]) -> Request:
    """`request` as whoever continues it must see it; `said`: the tokens of each sample so far.

    One sample's become prompt, which costs a prefill, and count as answered. Several part behind one prompt, and its KV
    is all that comes from outside: they are said again, token for token, which costs a step for each.
    """
    if len(said) > 1:
        return replace(request, again=tuple(map(tuple, said))) if any(said) else request
    emitted = said[0] if said else ()
    before = request.sampling
    sampling = replace(
        before,
        max_tokens=before.max_tokens - len(emitted),
        min_tokens=max(0, before.min_tokens - len(emitted)),
    )
    return replace(
        request, token_ids=(*request.token_ids, *emitted), sampling=sampling, answered=request.answered + len(emitted)
    )


def encode(request: Request) -> str:
    """What a continuation alone has is left out where there is none: as requests were before there were any."""
    values = ((each.name, getattr(request, each.name)) for each in fields(request))
    said = {name: value for name, value in values if name not in _RESUMED or value}
    return msgspec.json.encode(said).decode()  # `asdict` would copy a prompt token by token


def decode(text: str | bytes) -> Request:
    """Raises KeyError, TypeError or ValueError when `text` is not an encoded request."""
    raw = json.loads(text)
    sampling = dict(raw["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    sampling["logit_bias"] = tuple((int(token), float(bias)) for token, bias in sampling.get("logit_bias", ()))
    return Request(
        handoff_id=raw["handoff_id"],
        token_ids=tuple(raw["token_ids"]),
        sampling=Sampling(**sampling),
        salt=raw["salt"],
        first_token=raw["first_token"],
        answered=raw.get("answered", 0),
        again=tuple(tuple(said) for said in raw.get("again", ())),
    )
