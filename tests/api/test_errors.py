"""Errors: what is hidden, what is kept, and which status a client gets."""

from __future__ import annotations

import pytest

from pipeline import errors as ours
from pipeline.api import errors
from pipeline.api.errors import Problem, ProblemError


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot read /srv/models/x/config.json now", "cannot read <path> now"),
        ("Error 111 connecting to 127.0.0.1:6380.", "Error 111 connecting to <address>."),
        ("redis://user:secret@10.0.0.1:6379/0 refused", "<address> refused"),
        ("connect localhost:6380 failed", "connect <address> failed"),
        ("boom\nTraceback (most recent call last):\n  File x", "boom <traceback>"),
        ("<vllm.LLM object at 0x7f00aa11bb22>", "<vllm.LLM object at <pointer>>"),
        ("no replica of org/model-1.5 is alive", "no replica of org/model-1.5 is alive"),
        ("took 1/2 of 3.5 s and/or more", "took 1/2 of 3.5 s and/or more"),
    ],
)
def test_sanitised(message: str, shown: str) -> None:
    assert errors.sanitise(message) == shown


def test_long_messages_are_cut() -> None:
    assert errors.sanitise("x " * 400) == ("x " * 250)[:499] + "…"
    assert errors.sanitise("x" * 500) == "x" * 500


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (ours.ModelNotFoundError("m"), 404, "invalid_request_error", "model_not_found", {}),
        (ours.ContextLengthError(8, 9, "prompt"), 400, "invalid_request_error", "context_length_exceeded", {}),
        (ours.OverloadedError("o"), 429, "rate_limit_error", "overloaded", {"Retry-After": "1"}),
        (
            ours.BrokerError("b"),
            503,
            "service_unavailable",
            "broker_unavailable",
            {"Retry-After": "1", "x-should-retry": "true"},
        ),
        (ours.EngineError("e"), 502, "server_error", "engine_failed", {"x-should-retry": "true"}),
        (ours.DeadlineError("d"), 504, "timeout_error", "deadline_exceeded", {"x-should-retry": "true"}),
        (ours.QuarantinedError(2), 500, "server_error", "quarantined", {"x-should-retry": "false"}),
        (ours.ContractMismatchError({}), 502, "server_error", "contract_mismatch", {"x-should-retry": "false"}),
        (RuntimeError("r"), 500, "server_error", "internal_error", {"x-should-retry": "false"}),
        (ProblemError(Problem(499, "cancelled", "c")), 499, "request_cancelled", "cancelled", {}),
    ],
)
def test_status_type_code_and_headers(
    error: Exception, status: int, kind: str, code: str, headers: dict[str, str]
) -> None:
    found = errors.problem(error)
    assert (found.status, found.type, found.code, found.headers) == (status, kind, code, headers)


def test_ours_is_sanitised_and_the_clients_own_words_are_not() -> None:
    assert errors.problem(ours.EngineError("at /a/b/c")).message == "at <path>"
    assert errors.problem(ours.ModelNotFoundError("The model `/a/b` does not exist.")).message.count("/a/b") == 1
    assert errors.problem(ours.InvalidParameterError("p", "m", code="c")).body == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}
    }
