"""A client that goes away: the handoff is cancelled at once, streamed or not, before or after the first token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from tests.api.conftest import chat
from tests.api.fake import FakeBackend, steps

pytestmark = pytest.mark.anyio
Ids = Callable[[str], list[int]]


class Connection:
    """One raw ASGI request whose client can hang up, or stop reading."""

    def __init__(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        self.gone = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.sent: list[Any] = []
        self.arrived = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("edge", 80),
            "client": ("client", 1),
        }

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.may_send.wait()
        self.sent.append(message)
        self.arrived.set()

    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def begun(backend: FakeBackend) -> None:
    while not backend.submissions:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(app: FastAPI, backend: FakeBackend, stream: bool) -> None:
    backend.scripts = [[asyncio.Event()]]
    connection = Connection(chat(stream=stream))
    call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
    await begun(backend)
    connection.gone.set()
    await call
    assert [entry[0] for entry in backend.log] == ["cancel", "close"]
    assert not any(b"stop" in message.get("body", b"") for message in connection.sent)


@pytest.mark.parametrize("stream", [False, True])
async def test_after_some_tokens(app: FastAPI, backend: FakeBackend, ids: Ids, stream: bool) -> None:
    backend.scripts = [[*steps(ids("ab"), None), asyncio.Event()]]
    connection = Connection(chat(stream=stream))
    call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
    await begun(backend)
    while backend.submissions[0].read < len(ids("ab")):
        await asyncio.sleep(0.001)
    connection.gone.set()
    await call
    assert [entry[0] for entry in backend.log] == ["cancel", "close"]
    assert "[DONE]" not in connection.text()


async def test_what_is_told_after_the_client_has_gone_is_not_heard(
    app: FastAPI, backend: FakeBackend, ids: Ids
) -> None:
    """The entry that was on its way completes a stop string: nobody may tell the decoder so any more."""
    late = asyncio.Event()
    backend.scripts = [[*steps(ids("a"), None), late, *steps(ids("b"), None)]]
    connection = Connection(chat(stream=True, stop="b"))
    call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
    await begun(backend)
    await connection.arrived.wait()
    connection.gone.set()
    await call
    late.set()
    await backend.submissions[0].playing
    await asyncio.sleep(0)
    assert backend.submissions[0].read == len(ids("a")) + len(ids("b"))
    assert [entry[0] for entry in backend.log] == ["cancel", "close"]


async def test_all_of_several_prompts(app: FastAPI, backend: FakeBackend) -> None:
    backend.scripts = [[asyncio.Event()]]
    connection = Connection({"prompt": ["a", "b", "c"]}, "/v1/completions")
    call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
    while len(backend.submissions) < 3:
        await asyncio.sleep(0.001)
    connection.gone.set()
    await call
    assert sorted(entry[0] for entry in backend.log) == ["cancel"] * 3 + ["close"] * 3
    assert connection.sent == []


async def test_a_server_that_stops(app: FastAPI, backend: FakeBackend) -> None:
    backend.scripts = [[asyncio.Event()]]
    connection = Connection(chat())
    call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
    await begun(backend)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [entry[0] for entry in backend.log] == ["cancel", "close"]


async def test_a_slow_client_does_not_hold_up_the_decoder(app: FastAPI, backend: FakeBackend, ids: Ids) -> None:
    token_ids = ids("a b c d e f g h")
    backend.scripts = [steps(token_ids)]
    connection = Connection(chat(stream=True))
    connection.may_send.clear()
    call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
    await begun(backend)
    while backend.submissions[0].read < len(token_ids):
        await asyncio.sleep(0.001)
    assert connection.sent == []
    connection.may_send.set()
    await call
    assert backend.log == [("close",)]
    assert connection.text().endswith("data: [DONE]\n\n")


async def test_gone_after_the_end_is_nothing(app: FastAPI, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps(ids("a"))]
    connection = Connection(chat(stream=True))
    call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
    while "[DONE]" not in connection.text():
        await asyncio.sleep(0.001)
    connection.gone.set()
    await call
    assert backend.log == [("close",)]
