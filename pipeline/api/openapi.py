"""OpenAPI: the document at `/openapi.json`, so that tools know what may be sent here.

Handlers read bodies themselves (limits and error objects are ours), so what they read is added to what FastAPI finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

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
    kinds = dict.fromkeys(_BODIES.values())
    _, schemas = models_json_schema([(k, "validation") for k in kinds], ref_template="#/components/schemas/{model}")
    found.setdefault("components", {})["schemas"] = {**schemas["$defs"], "Error": _ERROR}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            _describe(path, operation)
    return found


def _describe(path: str, operation: dict[str, Any]) -> None:
    operation["responses"].pop("422", None)  # FastAPI's; what is not valid is a 400 here
    if path in _BODIES:
        schema = {"$ref": f"#/components/schemas/{_BODIES[path].__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, why in _STATUSES.items():
        operation["responses"][status] = {"description": why, **error}
