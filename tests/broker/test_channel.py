"""Entries of the token log: what is written comes back, and what is no entry is refused."""

from __future__ import annotations

import pytest

from pipeline.broker.channel import ErrorInfo, TokenEntry, decode
from pipeline.errors import PeerError
from pipeline.logprob import TokenLogprob


def test_encoding_round_trips() -> None:
    entry = TokenEntry(3, (1, 2), error=ErrorInfo("c", "m", True, 503), held_tokens=None)
    assert decode(entry.encode()) == entry
    logprobs = (TokenLogprob(1, -0.25, ((4, -0.125), (1, -0.25))), TokenLogprob(2, -3.5, ((2, -3.5), (9, -4.0))))
    entry = TokenEntry(3, (1, 2), finish="stop", sample=2, logprobs=logprobs, more=True)
    assert decode(entry.encode()) == entry


def test_what_was_not_asked_for_costs_no_bytes() -> None:
    assert TokenEntry(3, (1, 2)).encode() == '{"seq":3,"token_ids":[1,2]}'
    assert TokenEntry(3, (1,), logprobs=(TokenLogprob(1, -0.25, ((4, -0.125),)),)).encode() == (
        '{"seq":3,"token_ids":[1],"logprobs":[[1,-0.25,4,-0.125]]}'
    )


@pytest.mark.parametrize(
    ("entry", "last"),
    [
        (TokenEntry(0, (1,)), False),
        (TokenEntry(0, (1,), finish="stop"), True),
        (TokenEntry(0, (1,), finish="stop", sample=1, more=True), False),
        (TokenEntry(0, (), error=ErrorInfo("c", "m", True, 503)), True),
    ],
)
def test_which_entry_is_the_last(entry: TokenEntry, last: bool) -> None:
    assert entry.last is last


NO_ENTRIES = ["", "null", "[]", "{", '{"seq":0}', '{"seq":"0","token_ids":[]}', '{"seq":0,"token_ids":["a"]}']


@pytest.mark.parametrize(
    "text", [*NO_ENTRIES, '{"seq":0,"token_ids":[-1]}', '{"seq":0,"token_ids":[true]}', "[" * 9999]
)
def test_an_entry_that_is_none_is_the_writers_fault(text: str) -> None:
    with pytest.raises(PeerError, match="token log is not readable"):
        decode(text)
