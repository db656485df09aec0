"""Request: what both engines need to know of one prompt. Token ids, never text.

Made once by the API (which tokenises once), stored in the ledger as JSON, rebuilt by P and D. The engines get
explicit values for every sampling field: an engine's own default never leaks in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

# What an engine may lack. Everything else of a Sampling every engine can do.
FEATURES: Final = ("logprobs", "penalties", "min_p", "logit_bias", "min_tokens", "grammar", "n")
MAX_LOGPROBS: Final = 20
MAX_SAMPLES: Final = 8


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
    def resumable(self) -> bool:
        """Whether an answer cut off after some tokens can be continued as prompt + tokens: nothing of it depends on
        which of them were prompt, and there is one answer only."""
        return self.n == 1 and self.grammar is None and not (self.presence_penalty or self.frequency_penalty)

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
    """

    handoff_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    salt: str = ""
    first_token: bool = False

    @property
    def transfer_tokens(self) -> int:
        """Tokens whose KV D needs from outside: all but the last, where D computes that one itself."""
        return len(self.token_ids) - (not self.first_token)


def resumed(request: Request, emitted: Sequence[int]) -> Request:
    """`request` as whoever continues it must see it: what was answered so far is prompt, and counts as answered."""
    before = request.sampling
    sampling = replace(
        before,
        max_tokens=before.max_tokens - len(emitted),
        min_tokens=max(0, before.min_tokens - len(emitted)),
    )
    return replace(request, token_ids=(*request.token_ids, *emitted), sampling=sampling)


def encode(request: Request) -> str:
    return json.dumps(asdict(request), separators=(",", ":"))


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
    )
