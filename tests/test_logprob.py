"""Logprob: the compact form that travels in the token log."""

from __future__ import annotations

import json
import math
import struct

import pytest

from pipeline import logprob
from pipeline.logprob import TokenLogprob

SAID = (TokenLogprob(7, -0.5, ((3, -0.25), (7, -0.5))), TokenLogprob(8, -1.5))


def test_the_form() -> None:
    assert logprob.encode(SAID) == [[7, -0.5, 3, -0.25, 7, -0.5], [8, -1.5]]


def test_the_round_trip() -> None:
    assert logprob.decode(json.loads(json.dumps(logprob.encode(SAID)))) == SAID
    assert logprob.decode([]) == ()


def test_six_digits_travel() -> None:
    assert logprob.encode([TokenLogprob(1, -1.23456789)]) == [[1, -1.234568]]


def test_the_impossible_has_a_number() -> None:
    assert logprob.encode([TokenLogprob(1, -math.inf, ((2, -math.inf),))]) == [[1, -9999.0, 2, -9999.0]]


def test_the_packed_form() -> None:
    said = (TokenLogprob(7, -0.5, ((3, -0.25),)), TokenLogprob(8, -1.5, ((9, -2.0),)))
    data = logprob.pack(said)
    assert data == struct.pack("<fIffIf", -0.5, 3, -0.25, -1.5, 9, -2.0)
    assert logprob.unpack(data, (7, 8), 1) == said
    with pytest.raises(struct.error):
        logprob.unpack(data[:-1], (7, 8), 1)


@pytest.mark.parametrize("raw", [[[1]], [[1, -0.5, 3]], [1], [["x", "y"]]])
def test_what_is_none_is_refused(raw: list[object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        logprob.decode(raw)  # type: ignore[arg-type]
