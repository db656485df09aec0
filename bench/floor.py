"""Floor: what any HTTP edge on this stack costs. uvicorn on its fastest parts, and an application that does nothing.

It parses the request, then sends one ready-made chunk a token, all at once or paced by a timer: no framework, no
broker, no text. What `bench.api` measures of a real edge above this is the edge's own.

    python -m bench.floor PORT TOKENS_A_SECOND
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvicorn
from starlette.types import Message, Receive, Scope, Send

CHOICE = {"index": 0, "text": " water", "logprobs": None, "finish_reason": None}
CHUNK = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1790000000,
    "model": "smollm2-135m",
    "system_fingerprint": "crossfill-01234567",
    "choices": [CHOICE],
}
FRAME = f"data: {json.dumps(CHUNK, separators=(',', ':'))}\n\n".encode()


class Floor:
    """Answers every POST with `max_tokens` frames and `[DONE]`; everything else with nothing."""

    def __init__(self, rate: float) -> None:
        self._rate = rate  # tokens a second of each stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._live(receive, send)
            return
        ask = json.loads(await _body(receive) or b"{}")
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._tokens(ask.get("max_tokens", 0), ask.get("stream", False), send)
        await send(_part(b"data: [DONE]\n\n", more=False))

    async def _tokens(self, count: int, paced: bool, send: Send) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(count):
            await send(_part(FRAME))
            due += 1 / self._rate
            if paced:
                await asyncio.sleep(due - loop.time())

    async def _live(self, receive: Receive, send: Send) -> None:
        for what in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{what}.complete"})


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _part(payload: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": payload, "more_body": more}


if __name__ == "__main__":
    uvicorn.run(Floor(float(sys.argv[2])), port=int(sys.argv[1]), log_level="warning")
