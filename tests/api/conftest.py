"""The edge over a scripted backend: no broker, no engine, the tokeniser of a small random checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pipeline.api.app import create_app
from pipeline.api.served import Catalogue, Served
from pipeline.api.text import Text
from pipeline.contract import Contract
from pipeline.sample import tiny
from pipeline.settings import ApiSettings
from tests.api.fake import FakeBackend

EOS = 2
CREATED = 1_700_000_000


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def text(checkpoint: Path) -> Text:
    return Text.load(checkpoint)


@pytest.fixture(scope="session")
def model(text: Text) -> Served:
    contract = Contract(
        weights="w", tokenizer="t", config="c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=512
    )
    return Served("tiny", text, contract, (EOS,), CREATED, ("small",))


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def app(model: Served, backend: FakeBackend, checkpoint: Path) -> FastAPI:
    return create_app(settings(checkpoint), Catalogue([model]), backend)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as opened:
        yield opened


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def ids(text: Text) -> Callable[[str], list[int]]:
    def encode(written: str) -> list[int]:
        return text.encode(written, add_special_tokens=False)

    return encode


def settings(checkpoint: Path, **changed: Any) -> ApiSettings:
    plain = {
        "max_body_bytes": 100_000,
        "max_messages": 32,
        "default_max_tokens": 32,
        "hold_s": 0.05,
        "keep_alive_s": 0.05,
    }
    return ApiSettings.model_validate({"model": checkpoint, **plain, **changed})


def chat(content: str = "Hi", /, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}
