"""A body of many faults costs no more than one of a single fault: reading ends at the first of each branch."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.api.models import TokensAsk
from pipeline.api.responses import ResponsesAsk
from pipeline.api.schemas import ChatAsk, CompletionAsk, Strict

_MANY = 1000
_BRANCHES = 4  # of the widest union, the one of `prompt`


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionAsk, {"prompt": [-1] * _MANY}),
        (CompletionAsk, {"prompt": [""] * _MANY}),
        (CompletionAsk, {"prompt": [[-1]] * _MANY}),
        (CompletionAsk, {"prompt": [[-1] * _MANY]}),
        (CompletionAsk, {"prompt": "x", "logit_bias": {f"x{i}": 200 for i in range(_MANY)}}),
        (CompletionAsk, {"prompt": "x", "stop": [""] * _MANY}),
        (CompletionAsk, {"prompt": "x", "stop_token_ids": [-1] * _MANY}),
        (ChatAsk, {"messages": [1] * _MANY}),
        (ChatAsk, message(content=[1] * _MANY)),
        (ChatAsk, message(tool_calls=[1] * _MANY)),
        (ChatAsk, {**message(), "tools": [1] * _MANY}),
        (TokensAsk, {"tokens": [-1] * _MANY}),
        (ResponsesAsk, {"input": [1] * _MANY}),
        (ResponsesAsk, {"input": "x", "tools": [1] * _MANY}),
        (ResponsesAsk, {"input": "x", "metadata": {str(i): 1 for i in range(_MANY)}}),
    ],
)
def test_the_first_fault_ends_the_reading(kind: type[Strict], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert 1 <= refused.value.error_count() <= _BRANCHES
