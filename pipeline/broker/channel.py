"""Channel: what crosses from D to the API: tokens as entries of a log, each published too as `<index> <entry>`.

`emit.lua` does both in one step; `hub` is the API's side of it. Nothing here talks to a server.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec

from pipeline import logprob
from pipeline.errors import CrossfillError, PeerError
from pipeline.logprob import TokenLogprob


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it crosses processes."""

    code: str
    message: str
    retryable: bool
    http_status: int

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        if isinstance(error, CrossfillError):
            return cls(error.code, str(error), error.retryable, error.http_status)
        return cls("internal_error", f"{type(error).__name__}: {error}", False, 500)


class TokenEntry(msgspec.Struct, frozen=True):
    """Tokens of one engine step for one `sample`. `seq` counts the tokens of all samples before it.

    `finish` is the sample's; `more` beside it: other samples go on. The last entry has `error`, or `finish` alone.
    `held_tokens`, on the last entry: prompt tokens whose KV the decode engine already held. `logprobs` stand beside
    `token_ids` where they were asked for.
    """

    seq: int
    token_ids: tuple[int, ...]
    finish: str | None = None
    error: ErrorInfo | None = None
    held_tokens: int | None = None
    sample: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    more: bool = False

    @property
    def last(self) -> bool:
        return self.error is not None or (self.finish is not None and not self.more)

    def encode(self) -> str:
        """What is not there, or as it mostly is, is left out."""
        fields = {
            "seq": self.seq,
            "token_ids": self.token_ids,
            "finish": self.finish,
            "error": asdict(self.error) if self.error else None,
            "held_tokens": self.held_tokens,
            "sample": self.sample or None,
            "logprobs": None if self.logprobs is None else logprob.encode(self.logprobs),
            "more": self.more or None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}, separators=(",", ":"))


Count = Annotated[int, msgspec.Meta(ge=0)]


class _Wire(msgspec.Struct):
    """What `TokenEntry.encode` writes."""

    seq: Count
    token_ids: tuple[Count, ...]
    finish: str | None = None
    error: ErrorInfo | None = None
    held_tokens: Count | None = None
    sample: Count = 0
    logprobs: list[list[int | float]] | None = None
    more: bool = False


_DECODER = msgspec.json.Decoder(_Wire)


def decode(text: bytes | str) -> TokenEntry:
    """Raises PeerError when `text` is not an entry: whoever may write to the broker could have put anything there."""
    try:
        raw = _DECODER.decode(text)
        logprobs = None if raw.logprobs is None else logprob.decode(raw.logprobs)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise PeerError(f"an entry of the token log is not readable: {type(error).__name__}: {error}") from None
    return TokenEntry(raw.seq, raw.token_ids, raw.finish, raw.error, raw.held_tokens, raw.sample, logprobs, raw.more)
