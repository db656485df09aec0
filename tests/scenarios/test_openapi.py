"""The document at `/openapi.json` against the running system: every answer is one that it describes, none a 5xx."""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.scenarios.system import System

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]
EXAMPLES = int(os.environ.get("CROSSFILL_OPENAPI_EXAMPLES", "5"))  # of each mode; `make openapi` takes more
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def short(body: Any) -> Any:
    """The engine of this system is a slow one: an answer that may be long is asked to be short."""
    if isinstance(body, dict) and body.get("prompt", body.get("messages", body.get("input"))) is not None:
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            given_ = body.get(name)
            if given_ is None or (type(given_) is int and given_ > 2):
                body = {**body, name: 2}
    return body


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_answer_is_one_that_is_described(cheap: System, mode: GenerationMode) -> None:
    described = schemathesis.openapi.from_url(f"{cheap.url}/openapi.json")
    operations = [found.ok() for found in described.get_all_operations() if isinstance(found, Ok)]
    assert {operation.label for operation in operations} >= {"POST /v1/chat/completions", "GET /v1/models/{name}"}
    rejects = []
    if mode is GenerationMode.NEGATIVE:  # what takes no body can be asked nothing wrong
        rejects = [negative_data_rejection]
        operations = [operation for operation in operations if operation.body]
    statuses: set[int] = set()
    for operation in operations:

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def conforms(case: schemathesis.Case[Any]) -> None:
            case.body = short(case.body)
            answer = case.call(timeout=300)
            case.validate_response(answer, checks=[*CHECKS, *rejects])
            statuses.add(answer.status_code)

        conforms()
    assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses
    assert cheap.settled()["live"] == []
