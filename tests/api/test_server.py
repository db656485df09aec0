"""A real server on a real socket, asked by the client library that most people use."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from pipeline.api.app import create_app, shared_socket
from pipeline.api.served import Catalogue, Served
from pipeline.errors import ConfigError
from tests.api.conftest import EOS, settings
from tests.api.fake import FakeBackend, failure, steps

pytestmark = pytest.mark.anyio
Ids = Callable[[str], list[int]]
QUESTION: Any = [{"role": "user", "content": "Hi"}]
SAID = "Hello \N{GRINNING FACE}!"


@asynccontextmanager
async def serving(app: FastAPI, listener: socket.socket) -> AsyncIterator[str]:
    """Its URL while it runs on that socket, which is closed behind it."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    with listener:
        running = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await running


@pytest.fixture
async def url(app: FastAPI) -> AsyncIterator[str]:
    async with serving(app, socket.create_server(("127.0.0.1", 0))) as found:
        yield found


@pytest.fixture
async def sdk(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
        yield client


async def test_all_four_calls(sdk: openai.AsyncOpenAI, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps([*ids(SAID), EOS], "stop")]
    whole = await sdk.chat.completions.create(model="tiny", messages=QUESTION)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (SAID, "stop")
    options: Any = {"include_usage": True}
    stream = await sdk.chat.completions.create(model="tiny", messages=QUESTION, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"

    text = await sdk.completions.create(model="tiny", prompt="Hi")
    assert (text.choices[0].text, text.choices[0].finish_reason) == (SAID, "stop")
    parts = [part async for part in await sdk.completions.create(model="tiny", prompt="Hi", stream=True)]
    assert "".join(part.choices[0].text for part in parts) == SAID
    assert parts[-1].choices[0].finish_reason == "stop"
    assert [found.id async for found in sdk.models.list()] == ["tiny"]


async def test_many_at_once_keep_their_answers_apart(sdk: openai.AsyncOpenAI, backend: FakeBackend, ids: Ids) -> None:
    words = [f"word{i}" for i in range(16)]
    backend.scripts = [steps([*ids(word), EOS], "stop") for word in words]
    answers = await asyncio.gather(*(sdk.chat.completions.create(model="tiny", messages=QUESTION) for _ in words))
    by_handoff = {f"chatcmpl-{request.handoff_id}": word for request, word in zip(backend.requests, words, strict=True)}
    assert {answer.id: answer.choices[0].message.content for answer in answers} == by_handoff


async def test_errors_carry_code_and_param(sdk: openai.AsyncOpenAI, backend: FakeBackend, ids: Ids) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.chat.completions.create(model="nobody", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await sdk.chat.completions.create(model="tiny", messages=QUESTION, temperature=9)
    assert wrong.value.param == "temperature"
    backend.scripts = [[*steps(ids("ab"), None), failure("engine_failed", "boom")]]
    with pytest.raises(openai.APIError) as broken:
        async for _ in await sdk.chat.completions.create(model="tiny", messages=QUESTION, stream=True):
            pass
    assert (broken.value.code, broken.value.message) == ("engine_failed", "boom")


async def test_silence_does_not_disturb_the_client(sdk: openai.AsyncOpenAI, backend: FakeBackend, ids: Ids) -> None:
    silence = asyncio.Event()
    backend.scripts = [[silence, *steps([*ids("ok"), EOS], "stop")]]
    asyncio.get_running_loop().call_later(0.3, silence.set)
    stream = await sdk.chat.completions.create(model="tiny", messages=QUESTION, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ok"


async def test_a_failure_is_tried_again_only_when_that_may_help(url: str, backend: FakeBackend) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=1) as client:
        for retryable, tries in ((False, 1), (True, 2)):
            backend.scripts = [[failure("engine_failed", retryable=retryable)]]
            backend.requests.clear()
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="tiny", messages=QUESTION)
            assert len(backend.requests) == tries


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_connection_cancels(url: str, backend: FakeBackend, ids: Ids, stream: bool) -> None:
    backend.scripts = [[*steps(ids("ab"), None), asyncio.Event()]]
    body = {"messages": QUESTION, "stream": stream}
    async with httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body, timeout=60))
        while not backend.submissions:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await backend.submissions[0].closed.wait()
    assert [entry[0] for entry in backend.log if entry[0] != "start"] == ["cancel", "close"]


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not deal out connections")
async def test_two_servers_share_a_port(model: Served, checkpoint: Path, ids: Ids) -> None:
    """Sixty connections by chance to one alone: that does not happen."""
    async with AsyncExitStack() as stack:
        listener = shared_socket("127.0.0.1", 0)
        port = listener.getsockname()[1]
        backends = [FakeBackend(scripts=[steps(ids(SAID))]) for _ in range(2)]
        apps = [create_app(settings(checkpoint), Catalogue([model]), backend) for backend in backends]
        url = await stack.enter_async_context(serving(apps[0], listener))
        assert await stack.enter_async_context(serving(apps[1], shared_socket("127.0.0.1", port))) == url
        for _ in range(60):
            async with httpx.AsyncClient() as client:
                answer = await client.post(f"{url}/v1/completions", json={"prompt": "Hi"})
            assert answer.json()["choices"][0]["text"] == SAID
    assert sum(len(backend.requests) for backend in backends) == 60
    assert all(backend.requests for backend in backends)


def test_a_port_that_is_not_shared_cannot_be_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as alone, pytest.raises(ConfigError, match="cannot share"):
        shared_socket("127.0.0.1", alone.getsockname()[1])
