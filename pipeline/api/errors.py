"""Errors as clients see them: always `{"error": {"message", "type", "param", "code"}}`, the one shape SDKs read.

Rule: a message never carries a path, an address or a traceback of ours. `x-should-retry` tells SDKs whether to
send the request again: they would retry every 5xx by themselves and triple the work.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pipeline.errors import CrossfillError, RequestError

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/version",
    "/health",
    "/ready",
    "/status",
)
_MESSAGE_CHARS = 500
_RETRY_AFTER_S = 1
_TYPES = {
    401: "authentication_error",
    499: "request_cancelled",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}
_PRIVATE = (
    (re.compile(r"Traceback \(most recent call last\).*", re.DOTALL), "<traceback>"),
    (re.compile(r"\b[a-z][a-z0-9+]*://\S+"), "<address>"),
    (re.compile(r"(?<![\w/.])(?:/[\w.@+-]+){2,}/?"), "<path>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b"), "<address>"),
    (re.compile(r"\blocalhost:\d+\b"), "<address>"),
    (re.compile(r"\b0x[0-9a-fA-F]{6,}\b"), "<pointer>"),
)


class Problem(NamedTuple):
    """One error as it is told to a client."""

    status: int
    code: str
    message: str
    param: str | None = None
    retryable: bool = False

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        found = {"Retry-After": str(_RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found | ({"x-should-retry": str(self.retryable).lower()} if self.status >= 500 else {})


class ProblemError(CrossfillError):
    """A problem whose status and code are data: a refusal of HTTP itself, or an error that a worker reported."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem(error: BaseException) -> Problem:
    """What is not one of our errors says nothing of itself."""
    if isinstance(error, ProblemError):
        return error.problem._replace(message=shorten(str(error)))
    if not isinstance(error, CrossfillError):
        return Problem(500, "internal_error", "Internal server error.")
    ours = isinstance(error, RequestError)  # about the client's own words: nothing of ours to hide
    return Problem(
        error.http_status,
        getattr(error, "reason", error.code),
        shorten(str(error)) if ours else sanitise(str(error)),
        getattr(error, "param", None),
        error.retryable,
    )


def response(error: BaseException) -> JSONResponse:
    found = problem(error)
    return JSONResponse(found.body, found.status, found.headers)


def sanitise(message: str) -> str:
    """`message` without paths, addresses and tracebacks, in one line of at most 500 characters."""
    for pattern, label in _PRIVATE:
        message = pattern.sub(label, message)
    return shorten(message)


def shorten(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= _MESSAGE_CHARS else message[: _MESSAGE_CHARS - 1] + "…"


def install(app: FastAPI) -> None:
    """Answer our own errors and the framework's with the error object."""
    app.add_exception_handler(CrossfillError, _ours)
    app.add_exception_handler(HTTPException, _framework)


async def _ours(_: Request, error: Exception) -> JSONResponse:
    return response(error)


async def _framework(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    answer = response(_refusal(request, error))
    answer.headers.update(error.headers or {})  # 405 carries Allow
    return answer


def _refusal(request: Request, error: HTTPException) -> ProblemError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        served = ", ".join(ENDPOINTS)
        return refuse(404, "unknown_url", f"Unknown request URL: {where}. Served here: {served}.")
    if error.status_code == 405:
        return refuse(405, "method_not_allowed", f"{where}: method not allowed.")
    return refuse(error.status_code, "invalid_request", str(error.detail))


def refuse(status: int, code: str, message: str) -> ProblemError:
    return ProblemError(Problem(status, code, message))
