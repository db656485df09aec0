"""Logprob: how likely the model found a sampled token, and which others it found likelier.

Always of the model's own distribution: log-softmax of the raw logits, before bias, penalties, grammar and temperature.
On every engine, so that a number means the same wherever a request was decoded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

_DIGITS = 6  # an engine computes in FP16 or FP32: more digits would be noise on the wire


class TokenLogprob(NamedTuple):
    """`top`: as many of the likeliest tokens as were asked for, best first; `token_id` may be among them."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def encode(logprobs: Sequence[TokenLogprob]) -> list[list[Any]]:
    """As JSON: `[[token_id, logprob, id, logprob, id, logprob, ...], ...]`."""
    return [[one.token_id, _short(one.logprob), *(x for i, p in one.top for x in (i, _short(p)))] for one in logprobs]


def decode(raw: Sequence[Sequence[Any]]) -> tuple[TokenLogprob, ...]:
    """Raises TypeError or ValueError when `raw` was not encoded here."""
    return tuple(_decode(one) for one in raw)


def _decode(raw: Sequence[Any]) -> TokenLogprob:
    token_id, logprob, *rest = raw
    top = zip(rest[::2], rest[1::2], strict=True)
    return TokenLogprob(int(token_id), float(logprob), tuple((int(i), float(p)) for i, p in top))


def pack(logprobs: Sequence[TokenLogprob]) -> bytes:
    """For COMMIT, beside the token ids: per token its logprob (f32), then (id u32, logprob f32) of each of `top`."""
    return b"".join(
        struct.pack("<f", one.logprob) + b"".join(struct.pack("<If", *pair) for pair in one.top) for one in logprobs
    )


def unpack(data: bytes, token_ids: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Raises struct.error where `data` does not hold just so many."""
    form = struct.Struct("<f" + top * "If")
    found = [form.unpack_from(data, at * form.size) for at in range(len(token_ids))]
    pairs = [tuple(zip(values[1::2], values[2::2], strict=True)) for values in found]
    return tuple(TokenLogprob(*one) for one in zip(token_ids, (values[0] for values in found), pairs, strict=True))


def _short(logprob: float) -> float:
    """JSON has no -inf: what is impossible gets the number that OpenAI's API uses for it."""
    return round(logprob, _DIGITS) if math.isfinite(logprob) else -9999.0
