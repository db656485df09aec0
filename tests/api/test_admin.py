"""Models, health, readiness, status, and what surrounds every answer: ids, CORS, unknown paths."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from pipeline.api.served import Served
from pipeline.errors import BrokerError, NoReplicaError
from tests.api.conftest import chat
from tests.api.fake import FakeBackend

pytestmark = pytest.mark.anyio


async def test_health_is_about_this_process_alone(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.unready = BrokerError("down")
    answer = await client.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_ready(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "models": {"tiny": "ready"}})
    for error in (BrokerError("redis://u:p@h:1 is down"), NoReplicaError("no decode replica is alive")):
        backend.unready = error
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, error.code)
        assert answer.headers["Retry-After"] == "1"
        assert "u:p" not in answer.text


async def test_status(client: httpx.AsyncClient, model: Served) -> None:
    assert (await client.get("/status")).json() == {
        "version": "0.1.0",
        "model": "tiny",
        "models": [
            {
                "name": "tiny",
                "aliases": ["small"],
                "contract": {"digest": model.contract.digest, "context_length": 512},
            }
        ],
        "replicas": [],
        "live": [],
    }


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses/resp_1/cancel", "/nothing"])
async def test_unknown_paths_name_what_there_is(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "unknown_url", None)
    assert f"POST {path}" in error["message"]
    assert "/v1/chat/completions" in error["message"]


async def test_wrong_methods(client: httpx.AsyncClient) -> None:
    for method in ("GET", "DELETE", "PUT"):
        answer = await client.request(method, "/v1/chat/completions")
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        assert answer.headers["Allow"] == "POST"
    assert (await client.head("/v1/chat/completions")).status_code == 405
    assert (await client.head("/nothing")).status_code == 404


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/v1/models", "/v1/models/tiny"])
async def test_head(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.head(path)).status_code == 200


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": "0.1.0"}


async def test_every_answer_has_an_id(client: httpx.AsyncClient) -> None:
    given = await client.get("/health", headers={"X-Request-Id": "mine-1.2:3"})
    assert given.headers["X-Request-Id"] == "mine-1.2:3"
    for bad in ("a b", "x" * 129, ""):
        answer = await client.get("/health", headers={"X-Request-Id": bad})
        assert answer.headers["X-Request-Id"].startswith("req-")
    assert (await client.get("/nothing")).headers["X-Request-Id"].startswith("req-")
    refused = await client.post("/v1/chat/completions", json=chat(n=9))
    assert refused.headers["X-Request-Id"].startswith("req-")


async def test_browsers_may_ask(client: httpx.AsyncClient) -> None:
    preflight = {
        "Origin": "http://page",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    answer = await client.options("/v1/chat/completions", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    answer = await client.post("/v1/chat/completions", json={}, headers={"Origin": "http://page"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (400, "*")


async def test_the_lifespan_is_the_backends(app: FastAPI, backend: FakeBackend) -> None:
    async with app.router.lifespan_context(app):
        assert backend.log == [("start",)]
    assert backend.log == [("start",), ("end",)]
