"""Request: the JSON that lies in the ledger, and its round trip."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import request
from pipeline.request import Request, Sampling

SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.integers(1, 10**6),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 10**5),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop_token_ids=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31), st.floats(-100, 100)), max_size=4).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    min_tokens=st.integers(0, 10**6),
    grammar=st.none() | st.text(max_size=40),
    n=st.integers(1, 8),
)
REQUESTS = st.builds(
    Request,
    handoff_id=st.text(max_size=40),
    token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200).map(tuple),
    sampling=SAMPLINGS,
    salt=st.text(max_size=40),
    first_token=st.booleans(),
)


@settings(deadline=None)
@given(REQUESTS)
def test_the_round_trip_is_exact(made: Request) -> None:
    text = request.encode(made)
    assert request.decode(text) == made
    assert request.decode(text.encode()) == made
    assert isinstance(request.decode(text).sampling.stop_token_ids, tuple)


def test_the_stored_form() -> None:
    made = Request("h1", (5, 6), Sampling(max_tokens=3, temperature=0.0, stop_token_ids=(2,)), salt="s")
    assert request.encode(made) == (
        '{"handoff_id":"h1","token_ids":[5,6],"sampling":{"max_tokens":3,"temperature":0.0,"top_p":1.0,"top_k":0,'
        '"seed":null,"stop_token_ids":[2],"min_p":0.0,"presence_penalty":0.0,"frequency_penalty":0.0,'
        '"repetition_penalty":1.0,"logit_bias":[],"logprobs":null,"min_tokens":0,"grammar":null,"n":1},'
        '"salt":"s","first_token":false}'
    )


@pytest.mark.parametrize(("tokens", "moved"), [(1, 0), (2, 1), (65, 64), (129, 128)])
def test_the_last_token_stays_home(tokens: int, moved: int) -> None:
    assert Request("h", tuple(range(tokens)), Sampling(1)).transfer_tokens == moved


def test_with_a_first_token_from_outside_the_whole_prompt_moves() -> None:
    assert Request("h", (5, 6, 7), Sampling(1), first_token=True).transfer_tokens == 3


def test_what_the_defaults_mean() -> None:
    assert Sampling(16) == Sampling(16, temperature=1.0, top_p=1.0, top_k=0, seed=None, stop_token_ids=())
    assert Sampling(16).needs == frozenset()


@pytest.mark.parametrize(
    ("asked", "feature"),
    [
        ({"logprobs": 0}, "logprobs"),
        ({"presence_penalty": -1.0}, "penalties"),
        ({"frequency_penalty": 0.5}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"min_p": 0.1}, "min_p"),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"grammar": "{}"}, "grammar"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_asked_for_is_needed(asked: dict[str, Any], feature: str) -> None:
    assert Sampling(16, **asked).needs == {feature}


def test_a_request_stored_by_an_older_version_is_read() -> None:
    old = {"max_tokens": 3, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "stop_token_ids": [2]}
    read = request.decode(json.dumps(GOOD | {"sampling": old}))
    assert read.sampling == Sampling(3, temperature=0.0, stop_token_ids=(2,))


GOOD = json.loads(request.encode(Request("h", (1,), Sampling(1))))


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "null",
        "[]",
        "{}",
        json.dumps({name: value for name, value in GOOD.items() if name != "salt"}),
        json.dumps(GOOD | {"token_ids": 1}),
        json.dumps(GOOD | {"sampling": {}}),
        json.dumps(GOOD | {"sampling": GOOD["sampling"] | {"beam": 2}}),
        json.dumps(GOOD | {"sampling": {"stop_token_ids": []}}),
    ],
)
def test_what_is_no_request_is_refused(raw: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        request.decode(raw)


def test_what_is_continued_counts_what_was_said_as_prompt_and_as_answered() -> None:
    asked = Request("ab", (1, 2), Sampling(max_tokens=5, min_tokens=2, seed=7), salt="s", first_token=True)
    goes_on = Request(
        "ab", (1, 2, 8, 9, 8), Sampling(max_tokens=2, min_tokens=0, seed=7), salt="s", first_token=True, answered=3
    )
    assert request.resumed(asked, [[8, 9, 8]]) == goes_on
    assert request.resumed(asked, [[]]) == asked


def test_several_samples_are_said_again_behind_the_prompt_they_share() -> None:
    asked = Request("ab", (1, 2), Sampling(max_tokens=5, n=3, seed=7))
    goes_on = request.resumed(asked, [[8, 9], [], [7]])
    assert goes_on == Request("ab", (1, 2), Sampling(max_tokens=5, n=3, seed=7), again=((8, 9), (), (7,)))
    assert request.resumed(asked, [[], [], []]) == asked


@pytest.mark.parametrize("said", [[[8, 9]], [[8], [], [9, 7]]])
def test_a_continuation_comes_back(said: list[list[int]]) -> None:
    goes_on = request.resumed(Request("ab", (1, 2), Sampling(max_tokens=5, n=len(said))), said)
    assert request.decode(request.encode(goes_on)) == goes_on
    assert "again" not in request.encode(Request("ab", (1, 2), Sampling(max_tokens=5, n=2)))
