"""Both shapes of log-probabilities, by hand."""

from __future__ import annotations

import math

from pipeline.api import logprobs
from pipeline.api.output import Told
from pipeline.api.text import Text
from pipeline.logprob import TokenLogprob


def test_written() -> None:
    assert logprobs.written("é".encode()) == "é"
    assert logprobs.written(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert logprobs.written(b"") == ""


def one(text: Text, written: str) -> int:
    [token_id] = text.encode(written, add_special_tokens=False)
    return token_id


def test_of_a_chat(text: Text) -> None:
    a, b = one(text, "a"), one(text, "b")
    half = text.encode("\N{GRINNING FACE}", add_special_tokens=False)[0]
    told = [Told(TokenLogprob(a, -0.5, ((b, -1.5), (a, -0.5))), 0), Told(TokenLogprob(half, -math.inf), 1)]
    entry_a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    raw = text.token_bytes(half)
    assert logprobs.chat(told, text) == {
        "content": [
            {**entry_a, "top_logprobs": [entry_a, {"token": "b", "logprob": -1.5, "bytes": [98]}]},
            {"token": logprobs.written(raw), "logprob": -9999.0, "bytes": list(raw), "top_logprobs": []},
        ],
        "refusal": None,
    }


def test_of_a_completion(text: Text) -> None:
    a, b, c = (one(text, letter) for letter in "abc")
    told = [Told(TokenLogprob(c, -2.0, ((a, -0.25), (b, -1.0))), 0), Told(TokenLogprob(a, 0.0, ((a, 0.0),)), 1)]
    assert logprobs.completion(told, text, before=3) == {
        "tokens": ["c", "a"],
        "token_logprobs": [-2.0, 0.0],
        "top_logprobs": [{"a": -0.25, "b": -1.0, "c": -2.0}, {"a": 0.0}],  # what was sampled is always there
        "text_offset": [3, 4],
    }
    plain = logprobs.completion([Told(TokenLogprob(a, -1.0), 0)], text, before=0)
    assert (plain["top_logprobs"], plain["tokens"]) == (None, ["a"])
