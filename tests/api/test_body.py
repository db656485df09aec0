"""Where a body is read: a large one beside the event loop, with all that is checked of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fastapi import Request

from pipeline.api import body

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(("size", "beside"), [(10, False), (100_000, True)])
async def test_a_large_body_is_understood_beside_the_event_loop(size: int, beside: bool) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "%s"}' % (b"x" * size)}

    def understand(found: dict[str, Any]) -> tuple[int, bool]:
        return len(found["prompt"]), threading.current_thread() is not loop_thread

    loop_thread = threading.current_thread()
    request = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
    assert await body.read(request, 1 << 20, understand) == (size, beside)
