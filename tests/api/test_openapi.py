"""The document of the API: every endpoint with the body it really reads."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio


def references(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(references, node))
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
    return own.union(*map(references, node.values()))


async def test_every_body_is_described(client: httpx.AsyncClient) -> None:
    found = (await client.get("/openapi.json")).json()
    assert found["info"] == {"title": "Crossfill", "version": "0.1.0"}
    posts = {
        path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
        for path, operations in found["paths"].items()
        if "post" in operations
    }
    assert posts == {
        "/v1/chat/completions": "ChatAsk",
        "/v1/completions": "CompletionAsk",
        "/v1/responses": "ResponsesAsk",
        "/tokenize": "TextAsk",
        "/detokenize": "TokensAsk",
    }
    names = set(found["components"]["schemas"])
    assert {reference.removeprefix("#/components/schemas/") for reference in references(found)} <= names
    chat = found["components"]["schemas"]["ChatAsk"]
    assert chat["required"] == ["messages"]
    assert {"tools", "logprobs", "n", "response_format", "stream_options"} <= set(chat["properties"])


async def test_every_answer_is_described(client: httpx.AsyncClient) -> None:
    found = (await client.get("/openapi.json")).json()
    answers = {
        (path, kind): content["schema"].get("$ref", content["schema"].get("type", "")).split("/")[-1]
        for path, operations in found["paths"].items()
        for operation in operations.values()
        for kind, content in operation["responses"]["200"].get("content", {}).items()
    }
    assert answers == {
        ("/v1/chat/completions", "application/json"): "ChatCompletion",
        ("/v1/chat/completions", "text/event-stream"): "string",
        ("/v1/completions", "application/json"): "Completion",
        ("/v1/completions", "text/event-stream"): "string",
        ("/v1/responses", "application/json"): "Response",
        ("/v1/responses", "text/event-stream"): "string",
        ("/v1/models", "application/json"): "ModelList",
        ("/v1/models/{name}", "application/json"): "ModelCard",
        ("/tokenize", "application/json"): "Tokens",
        ("/detokenize", "application/json"): "TokensText",
        ("/version", "application/json"): "Version",
        ("/ready", "application/json"): "Ready",
        ("/status", "application/json"): "Status",
        ("/handoffs", "application/json"): "Handoffs",
        ("/handoffs/{handoff_id}", "application/json"): "Handoff",
        ("/explain", "application/json"): "Explained",
        ("/metrics", "text/plain"): "string",
        ("/dashboard", "text/html"): "string",
    }


async def test_errors_are_described_as_they_are(client: httpx.AsyncClient) -> None:
    found = (await client.get("/openapi.json")).json()
    for operations in found["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["400"]["content"]["application/json"]["schema"] == {
                "$ref": "#/components/schemas/Error"
            }
