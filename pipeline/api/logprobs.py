"""Logprobs: log-probabilities of sampled tokens in the two shapes of the OpenAI schema.

`bytes` are the token's own, also where they are half a character: such a token is written `bytes:\\xf0\\x9f`, as
OpenAI writes it, because U+FFFD would say that the model wrote one. JSON has no -inf: -9999 stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.api.output import Told
from pipeline.api.text import Text

_LOWEST = -9999.0


def chat(tokens: Sequence[Told], text: Text) -> dict[str, Any]:
    """`choices[].logprobs` of a chat; `top_logprobs` are the likeliest tokens, the sampled one only if it is one."""
    return {"content": [_entry(each, text) for each in tokens], "refusal": None}


def completion(tokens: Sequence[Told], text: Text, before: int) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion. `before`: characters of an echoed prompt in front of the answer.

    `top_logprobs` always holds the sampled token too, so it may have one more entry than was asked for.
    """
    return {
        "tokens": [written(text.token_bytes(each.token.token_id)) for each in tokens],
        "token_logprobs": [_finite(each.token.logprob) for each in tokens],
        "top_logprobs": [_table(each, text) for each in tokens] if any(each.token.top for each in tokens) else None,
        "text_offset": [before + each.offset for each in tokens],
    }


def written(token: bytes) -> str:
    """A token's text; one that is no whole character by its bytes."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _entry(told: Told, text: Text) -> dict[str, Any]:
    top = sorted(told.token.top, key=lambda item: (-item[1], item[0]))
    return {
        **_one(told.token.token_id, told.token.logprob, text),
        "top_logprobs": [_one(token_id, logprob, text) for token_id, logprob in top],
    }


def _one(token_id: int, logprob: float, text: Text) -> dict[str, Any]:
    token = text.token_bytes(token_id)
    return {"token": written(token), "logprob": _finite(logprob), "bytes": list(token)}


def _table(told: Told, text: Text) -> dict[str, float]:
    table: dict[str, float] = {}
    for token_id, logprob in (*told.token.top, (told.token.token_id, told.token.logprob)):
        table.setdefault(written(text.token_bytes(token_id)), _finite(logprob))
    return table


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
