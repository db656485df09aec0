"""Where a prompt is made: a short one on the event loop, whatever may take a while beside it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fastapi import Request

from pipeline.api import plan, schemas
from pipeline.api.schemas import ChatAsk

pytestmark = pytest.mark.anyio
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("size", "fields", "in_thread"),
    [
        ("2048", {}, False),
        ("2049", {}, True),
        (None, {}, True),  # sent in chunks
        ("x", {}, True),
        ("300", {"response_format": {"type": "json_object"}}, True),
        ("300", {"tools": [TOOL]}, True),
        ("300", {"chat_template_kwargs": {"a": 1}}, True),
        ("300", {"tools": [], "chat_template_kwargs": {}}, False),
    ],
)
async def test_what_may_take_a_while_is_made_beside_the_event_loop(
    size: str | None, fields: dict[str, Any], in_thread: bool
) -> None:
    headers = [] if size is None else [(b"content-length", size.encode())]
    ask = schemas.read(ChatAsk, {"messages": [{"role": "user", "content": "Hi"}], **fields})
    maker = await plan.beside(Request({"type": "http", "headers": headers}), ask, threading.current_thread)
    assert (maker is not threading.current_thread()) is in_thread
