"""OpenAPI: the document at `/openapi.json`, so that tools know what may be sent here.

Handlers read bodies and build answers themselves (limits and error objects are ours), so what they read and how they
answer is added to what FastAPI finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pipeline.api import shape
from pipeline.api.models import TextAsk, TokensAsk
from pipeline.api.responses import ResponsesAsk
from pipeline.api.schemas import ChatAsk, CompletionAsk

_BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatAsk,
    "/v1/completions": CompletionAsk,
    "/v1/responses": ResponsesAsk,
    "/tokenize": TextAsk,
    "/detokenize": TokensAsk,
}
_ANSWERS: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": shape.ChatCompletion,
    "/v1/completions": shape.Completion,
    "/v1/responses": shape.Response,
    "/v1/models": shape.ModelList,
    "/v1/models/{name}": shape.ModelCard,
    "/tokenize": shape.Tokens,
    "/detokenize": shape.TokensText,
    "/version": shape.Version,
    "/ready": shape.Ready,
    "/status": shape.Status,
    "/handoffs": shape.Handoffs,
    "/handoffs/{handoff_id}": shape.Handoff,
    "/explain": shape.Explained,
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # with `stream`: server-sent events
_EMPTY = ("/health",)  # a 200 without a body
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "the request is not valid",
    "401": "no API key, or one that is not known",
    "404": "no such model, or no such URL",
    "413": "the body is too large",
    "415": "the body is no JSON",
    "429": "too much is waiting: come back later",
    "500": "a fault of ours",
    "502": "an engine or a transfer failed",
    "503": "nobody can serve this now: come back later",
    "504": "it took too long",
}


class Documented(FastAPI):
    """Makes the document when it is first asked for."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _completed(super().openapi())
        return self.openapi_schema


def _completed(found: dict[str, Any]) -> dict[str, Any]:
    kinds = dict.fromkeys((*_BODIES.values(), *_ANSWERS.values()))
    _, schemas = models_json_schema([(k, "validation") for k in kinds], ref_template="#/components/schemas/{model}")
    found.setdefault("components", {})["schemas"] = {**schemas["$defs"], "Error": _ERROR}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            _describe(path, operation)
    return found


def _describe(path: str, operation: dict[str, Any]) -> None:
    operation["responses"].pop("422", None)  # FastAPI's; what is not valid is a 400 here
    if path in _BODIES:
        operation["requestBody"] = {"required": True, "content": _json(_BODIES[path])}
    if path in _ANSWERS:
        operation["responses"]["200"]["content"] = _json(_ANSWERS[path])
    if path in _STREAMED:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    if path in _EMPTY:
        del operation["responses"]["200"]["content"]
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, why in _STATUSES.items():
        operation["responses"][status] = {"description": why, **error}


def _json(kind: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
