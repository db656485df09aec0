"""Models, health, readiness, status, and what surrounds every answer: ids, CORS, unknown paths."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from pipeline.api.served import Served
from pipeline.errors import BrokerError, NoReplicaError
from tests.api.conftest import chat
from tests.api.fake import FakeBackend, steps

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


async def test_explain(client: httpx.AsyncClient) -> None:
    answer = await client.get("/explain", params={"tokens": 300})
    assert answer.json() == {"model": "tiny", "tokens": 300, "ways": [{"way": "vllm->tiny", "tokens": 300}]}
    assert (await client.get("/explain", params={"model": "other"})).status_code == 404
    for wrong in ("0", "-1", "many", "9" * 9):
        refused = await client.get("/explain", params={"tokens": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


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


async def test_metrics_are_prometheus_text(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE crossfill_requests_total counter" in answer.text
    answer = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")


async def test_what_a_request_did_is_counted(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.scripts = [steps([5, 6, 7])]
    assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
    text = (await client.get("/metrics")).text
    assert 'crossfill_requests_total{model="tiny",outcome="finished"} 1.0' in text
    assert 'crossfill_output_tokens_total{model="tiny"} 3.0' in text


async def test_handoffs(client: httpx.AsyncClient) -> None:
    assert (await client.get("/handoffs")).json() == {"handoffs": [{"handoff_id": "a" * 32, "recent": 50}]}
    assert (await client.get("/handoffs?recent=0")).json()["handoffs"][0]["recent"] == 0
    assert (await client.get(f"/handoffs/{'a' * 32}")).json() == {"handoff_id": "a" * 32}


@pytest.mark.parametrize("recent", ["-1", "257", "x", "1e2", "٣", ""])
async def test_how_many_handoffs_is_a_small_number(client: httpx.AsyncClient, recent: str) -> None:
    answer = await client.get("/handoffs", params={"recent": recent})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "recent")


@pytest.mark.parametrize("handoff_id", ["b" * 32, "A" * 32, "x", "%7B*%7D"])
async def test_an_unknown_handoff(client: httpx.AsyncClient, handoff_id: str) -> None:
    answer = await client.get(f"/handoffs/{handoff_id}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "handoff_unknown")
