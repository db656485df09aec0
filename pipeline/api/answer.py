"""Answer: a relay told to the client, as one JSON body or as server-sent events.

Rules of the stream: only `data:` lines and comments are sent (SDKs break on anything else); the 200 is held until
the first event or `hold_s`, so that early failures have a real status; a later failure is an error frame, then
`[DONE]`, never an invented finish. Both kinds end at once, and cancel, when the client is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from pipeline.api import errors
from pipeline.api.relay import Choice, Event, Relay
from pipeline.api.served import Served
from pipeline.errors import CrossfillError, HandoffCancelledError

T = TypeVar("T")
JSON = dict[str, Any]
_log = logging.getLogger(__name__)


class ClientGoneError(HandoffCancelledError):
    """The connection was closed before the answer was complete."""


class Pace(NamedTuple):
    """Seconds: how long the status of a stream is held back, and the silence after which a comment is sent."""

    hold_s: float = 1.0
    keep_alive_s: float = 10.0


class Shape(Protocol):
    """What differs between chat and text completions: the objects of the OpenAI schema."""

    def head(self, *, stream: bool) -> JSON:
        """Everything around `choices`."""
        ...

    def opening(self, index: int) -> JSON | None:
        """The first choice object of a stream, if there is one before any text."""
        ...

    def piece(self, index: int, text: str) -> JSON: ...

    def closing(self, index: int, finish: str) -> JSON: ...

    def whole(self, index: int, text: str, finish: str) -> JSON:
        """The choice object of a non-stream answer."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """What the objects of one answer have in common around `choices`."""

    answer_id: str
    created: int
    served: Served

    def of(self, kind: str) -> JSON:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
        }


@dataclass(frozen=True, slots=True)
class Telling:
    """How one answer is told."""

    shape: Shape
    pace: Pace
    stream: bool = False
    usage: bool = False  # one more chunk, with the usage and no choices
    running_usage: bool = False  # and the usage so far on every chunk
    traced: bool = False


class Answer(Response):
    """The whole answer: it opens and closes the relay itself, so nothing leaks between handler and response."""

    def __init__(self, relay: Relay, telling: Telling) -> None:
        super().__init__()
        self._relay = relay
        self._telling = telling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tell = self._send_stream(send) if self._telling.stream else self._send_json(scope, receive, send)
        try:
            await until_gone(receive, tell)
        except ClientGoneError:
            _log.info("%s %s: the client went away", scope["method"], scope["path"])
        finally:
            await self._relay.close()

    async def _send_json(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._relay.open()
        texts = [""] * len(self._relay.choices)
        while not self._relay.done:
            event = await self._relay.next()
            assert event is not None  # there was no timeout
            texts[event.at] += event.text
        await JSONResponse(self._body(texts))(scope, receive, send)

    def _body(self, texts: list[str]) -> JSON:
        shape, choices = self._telling.shape, self._relay.choices
        told = [shape.whole(i, texts[i], choice.finish or "") for i, choice in enumerate(choices)]
        return {**shape.head(stream=False), "choices": told, "usage": usage(choices), **self._trace()}

    async def _send_stream(self, send: Send) -> None:
        await self._relay.open()
        first = await self._relay.next(self._telling.pace.hold_s)
        await send(_start())
        try:
            await self._send_events(first, send)
        except Exception as error:
            if not isinstance(error, CrossfillError):
                _log.exception("a stream broke")
            await send(_data(errors.problem(error).body))
        await send(_part(b"data: [DONE]\n\n", more=False))

    async def _send_events(self, event: Event | None, send: Send) -> None:
        for index in range(len(self._relay.choices)):
            if opening := self._telling.shape.opening(index):
                await send(self._chunk([opening]))
        while True:
            for message in self._told(event):
                await send(message)
            if self._relay.done:
                break
            event = await self._relay.next(self._telling.pace.keep_alive_s)
        if self._telling.usage:
            await send(self._chunk([], last=True))

    def _told(self, event: Event | None) -> list[Message]:
        if event is None:
            return [_part(b": keep-alive\n\n")]
        shape = self._telling.shape
        told = [self._chunk([shape.piece(event.at, event.text)])] if event.text else []
        if event.finish:
            last = self._relay.done and not self._telling.usage
            told.append(self._chunk([shape.closing(event.at, event.finish)], last=last))
        return told

    def _chunk(self, choices: list[JSON], *, last: bool = False) -> Message:
        chunk = {**self._telling.shape.head(stream=True), "choices": choices}
        if self._telling.usage:
            chunk["usage"] = usage(self._relay.choices) if self._telling.running_usage or not choices else None
        return _data(chunk | self._trace() if last else chunk)

    def _trace(self) -> JSON:
        if not self._telling.traced:
            return {}
        traces = [choice.trace for choice in self._relay.choices]
        return {"crossfill": traces[0] if len(traces) == 1 else {"choices": traces}}


def usage(choices: tuple[Choice, ...]) -> JSON:
    """Token counts over all choices; `cached_tokens` are those whose KV the decode engine already held."""
    prompt = sum(choice.prompt_tokens for choice in choices)
    completion = sum(choice.output.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in choices)},
    }


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects (then ClientGoneError).

    The request's body must have been read: what `receive` tells next is the disconnect.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _data(found: JSON) -> Message:
    return _part(b"data: " + json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n")


def _part(payload: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": payload, "more_body": more}


def _start() -> Message:
    """A fresh one each time: middleware adds its headers to it."""
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}
