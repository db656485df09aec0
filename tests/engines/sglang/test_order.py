"""What worker and plug-in tell each other about draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.engines.sglang import message, order
from pipeline.engines.sglang.order import First
from pipeline.logprob import TokenLogprob
from pipeline.request import MAX_LOGPROBS, MAX_SAMPLES, Request, Sampling


@pytest.mark.parametrize(
    ("asked", "ours"),
    [
        ({"temperature": 0.7, "top_k": 4, "top_p": 0.5, "seed": 3, "logprobs": 5, "n": 4}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": ((1, 2.0),)}, True),
        ({"min_tokens": 1}, True),
        ({"grammar": "{}"}, True),
        ({"min_p": 0.1, "temperature": 0.5}, True),
        ({"min_p": 0.1, "temperature": 0.0}, False),  # the best token is the best token
    ],
    ids=str,
)
def test_what_is_drawn_by_us(asked: dict[str, Any], ours: bool) -> None:
    assert order.drawn_by_us(Request("h", (1,), Sampling(9, **asked))) is ours


def test_what_is_said_again_is_drawn_by_us() -> None:
    assert order.drawn_by_us(Request("h", (1,), Sampling(9), again=((5,),)))
    assert not order.drawn_by_us(Request("h", (1,), Sampling(9), again=((),)))


def test_an_order_is_the_request_without_its_prompt() -> None:
    request = Request("h-1", tuple(range(9000)), Sampling(9, logit_bias=((1, 2.0),), seed=-3), "salt", first_token=True)
    params = order.write(request)
    assert all(len(value) < 1000 for value in params.values())
    assert order.read(params, list(range(9000))) == request
    goes_on = replace(request, answered=3, again=((4, 5),))
    assert order.read(order.write(goes_on), list(range(9000))) == goes_on
    assert order.read(None, [1]) is None
    assert order.read({"thinking_budget": 3}, [1]) is None


def test_first_tokens_travel_exactly() -> None:
    top = tuple((100_000 + at, -0.5 * at) for at in range(MAX_LOGPROBS))
    ids = tuple(range(5, 5 + MAX_SAMPLES))
    whole = First(ids, tuple(TokenLogprob(token, -1.5, top) for token in ids))
    asked = Sampling(9, n=MAX_SAMPLES, logprobs=MAX_LOGPROBS)
    assert order.unpack(order.pack(whole), asked) == whole
    assert len(order.pack(whole)) <= message.MAX_SIZE - message.SIZE
    assert order.unpack(order.pack(First((3,))), Sampling(9)) == First((3,))
