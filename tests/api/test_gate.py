"""Who may ask what: API keys at the door, before anything of a request is read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pipeline.api import keyring
from pipeline.api.app import create_app
from pipeline.api.served import Catalogue, Served
from pipeline.errors import ConfigError
from tests.api.conftest import EOS, chat, settings
from tests.api.fake import FakeBackend, steps

pytestmark = pytest.mark.anyio


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def key(file: Path) -> str:
    return keyring.new(file, "alice")


@pytest.fixture
def locked(model: Served, backend: FakeBackend, checkpoint: Path, file: Path, key: str) -> FastAPI:
    return create_app(settings(checkpoint, keys_file=file), Catalogue([model]), backend)


@pytest.fixture
async def remote(locked: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_from(locked, "203.0.113.9") as opened:
        yield opened


def client_from(app: FastAPI, address: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(address, 5))
    return httpx.AsyncClient(transport=transport, base_url="http://edge")


def authorised(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_with_a_key(remote: httpx.AsyncClient, backend: FakeBackend, key: str) -> None:
    backend.scripts = [steps([EOS], "stop")]
    for headers in (authorised(key), {"Authorization": f"bearer  {key} "}):
        answer = await remote.post("/v1/chat/completions", json=chat(), headers=headers)
        assert answer.status_code == 200
    assert (await remote.get("/v1/models", headers=authorised(key))).status_code == 200


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "No API key provided"),
        ({"Authorization": "Bearer cf-wrong"}, "Incorrect API key"),
        ({"Authorization": "Basic abc"}, "No API key provided"),
        ({"Authorization": "Bearer \xff"}, "Incorrect API key"),
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions", "/tokenize", "/v1/nothing"]
)
async def test_without_one(
    remote: httpx.AsyncClient, backend: FakeBackend, path: str, headers: dict[str, str], said: str
) -> None:
    given = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    answer = await remote.post(path, content=b"{", headers=given)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"].startswith("req-")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert said in error["message"]
    assert "wrong" not in error["message"]
    assert backend.requests == []


async def test_what_is_open(remote: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/version"):
        assert (await remote.get(path)).status_code == 200
    assert (await remote.get("/status")).status_code == 401
    assert (await remote.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_operators_pages_on_the_same_machine(locked: FastAPI, address: str) -> None:
    async with client_from(locked, address) as local:
        assert (await local.get("/status")).status_code == 200
        assert (await local.get("/v1/models")).status_code == 401


async def test_a_browser_may_ask_before_it_has_a_key(remote: httpx.AsyncClient) -> None:
    headers = {
        "Origin": "http://page",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    answer = await remote.options("/v1/chat/completions", headers=headers)
    assert answer.status_code == 200
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    refused = await remote.post("/v1/chat/completions", json=chat(), headers={"Origin": "http://page"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")


async def test_keys_change_while_it_runs(remote: httpx.AsyncClient, backend: FakeBackend, file: Path, key: str) -> None:
    second = keyring.new(file, "bob")
    keyring.revoke(file, "alice")
    assert (await remote.get("/v1/models", headers=authorised(second))).status_code == 200
    assert (await remote.get("/v1/models", headers=authorised(key))).status_code == 401


async def test_origins_are_a_setting(model: Served, backend: FakeBackend, checkpoint: Path) -> None:
    expected: list[tuple[list[str], Any, Any]] = [
        (["https://a.example"], "https://a.example", None),
        ([], None, None),
    ]
    for origins, allowed, foreign in expected:
        app = create_app(settings(checkpoint, cors_origins=origins), Catalogue([model]), backend)
        async with client_from(app, "203.0.113.9") as client:
            for origin, expect in (("https://a.example", allowed), ("https://b.example", foreign)):
                answer = await client.get("/health", headers={"Origin": origin})
                assert answer.headers.get("access-control-allow-origin") == expect


def test_a_missing_file_is_told_at_the_start(model: Served, backend: FakeBackend, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"api\.keys_file"):
        create_app(settings(checkpoint, keys_file="no/such/file"), Catalogue([model]), backend)
