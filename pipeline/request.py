"""Request: what both engines need to know of one prompt. Token ids, never text.

Made once by the API (which tokenises once), stored in the ledger as JSON, rebuilt by P and D. The engines get
explicit values for every sampling field: an engine's own default never leaks in.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How D draws tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `seed` None is unseeded."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


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


def encode(request: Request) -> str:
    return json.dumps(asdict(request), separators=(",", ":"))


def decode(text: str | bytes) -> Request:
    """Raises KeyError, TypeError or ValueError when `text` is not an encoded request."""
    raw = json.loads(text)
    sampling = dict(raw["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    return Request(
        handoff_id=raw["handoff_id"],
        token_ids=tuple(raw["token_ids"]),
        sampling=Sampling(**sampling),
        salt=raw["salt"],
        first_token=raw["first_token"],
    )
