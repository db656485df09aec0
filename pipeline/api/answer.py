"""Answer: a relay told to the client, as one JSON body or as server-sent events.

Rules of the stream: only `data:` lines and comments are sent (SDKs break on anything else); the 200 is held until
the first event or `hold_s`, so that early failures have a real status; a later failure is an error frame, then
`[DONE]`, never an invented finish. Both kinds end at once, and cancel, when the client is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from pipeline.api import errors
from pipeline.api.errors import Problem
from pipeline.api.output import Told
from pipeline.api.relay import Event, Relay
from pipeline.errors import CrossfillError, HandoffCancelledError

T = TypeVar("T")
JSON = dict[str, Any]
_ENCODE = msgspec.json.Encoder().encode  # an eighth of what the standard library takes
DONE = b"data: [DONE]\n\n"
_log = logging.getLogger(__name__)


class ClientGoneError(HandoffCancelledError):
    """The connection was closed before the answer was complete."""


class Pace(NamedTuple):
    """Seconds: how long the status of a stream is held back, and the silence after which a comment is sent."""

    hold_s: float = 1.0
    keep_alive_s: float = 10.0


class Teller(Protocol):
    """What differs between the endpoints: the objects of their schema. It may remember what it has told."""

    @property
    def named(self) -> bool:
        """Whether a frame of the stream has its object's `type` as its event name."""
        ...

    @property
    def trailer(self) -> bytes:
        """What follows the last frame."""
        ...

    def opening(self, relay: Relay) -> list[JSON]:
        """The first objects of a stream, before any text."""
        ...

    def told(self, event: Event, relay: Relay) -> list[JSON]: ...

    def ending(self, relay: Relay) -> list[JSON]:
        """The last objects of a stream, after every choice's finish."""
        ...

    def failed(self, problem: Problem) -> JSON:
        """The object that tells a failure after the 200."""
        ...

    def whole(self, events: Sequence[Event], relay: Relay) -> JSON:
        """The non-stream answer; one event a choice, with all its text."""
        ...


@dataclass(frozen=True, slots=True)
class Telling:
    """How one answer is told."""

    teller: Teller
    pace: Pace
    stream: bool = False
    traced: bool = False


class Answer(Response):
    """The whole answer: it opens and closes the relay itself, so nothing leaks between handler and response."""

    def __init__(self, relay: Relay, telling: Telling) -> None:
        super().__init__()
        self._relay = relay
        self._telling = telling
        self._teller = telling.teller

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
        events: list[Event] = []
        while not self._relay.done:
            events += await self._relay.next()
        whole = self._teller.whole(_gathered(events, self._relay.finishes), self._relay)
        await JSONResponse(whole | self._trace())(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        await self._relay.open()
        first = await self._relay.next(self._telling.pace.hold_s)
        await send(_start())
        try:
            await self._send_events(first, send)
        except Exception as error:
            if not isinstance(error, CrossfillError):
                _log.exception("a stream broke")
            await send(_part(self._frames([self._teller.failed(errors.problem(error))])))
        await send(_part(self._teller.trailer, more=False))

    async def _send_events(self, events: list[Event], send: Send) -> None:
        """What came at once leaves at once: one write for all of it."""
        found = self._teller.opening(self._relay)
        hose = Hose(lambda event: self._frames(self._teller.told(event, self._relay)), send)
        self._relay.pour(hose.take)
        while True:
            for event in events:
                found += self._teller.told(event, self._relay)
            if self._relay.done:
                break
            await send(_part(self._frames(found) if found or events else b": keep-alive\n\n"))
            events, found = await self._heard(hose), []
        found += self._teller.ending(self._relay)
        found[-1] |= self._trace()
        await send(_part(self._frames(found)))

    async def _heard(self, hose: Hose) -> list[Event]:
        """Events that were not poured; none after a silence. What ended the answer comes behind what was poured."""
        while True:
            try:
                events = await self._relay.next(self._telling.pace.keep_alive_s)
            except Exception:
                await hose.flush()
                raise
            if not await hose.flush() or events:
                return events

    def _frames(self, found: Sequence[JSON]) -> bytes:
        return b"".join(_frame(each, each["type"] if self._teller.named else None) for each in found)

    def _trace(self) -> JSON:
        if not self._telling.traced:
            return {}
        traces = [prompt.trace for prompt in self._relay.prompts]
        return {"crossfill": traces[0] if len(traces) == 1 else {"prompts": traces}}


class Hose:
    """Sends what an event tells in the call that tells of it: no task is woken for a token.

    ASGI's `send` is a coroutine, which runs through at once unless the client is slow: then it stops at its first
    pause, and `flush` goes on with it.
    """

    def __init__(self, tell: Callable[[Event], bytes], send: Send) -> None:
        self._tell = tell
        self._send = send
        self._paused: _Paused | None = None

    def take(self, event: Event) -> bool:
        """False: a send has begun, and has to be flushed before the next."""
        payload = self._tell(event)
        if not payload:
            return True
        sending: Any = self._send(_part(payload)).__await__()
        try:
            self._paused = _Paused(sending, next(sending))
        except StopIteration:
            return True
        return False

    async def flush(self) -> bool:
        """Whether there was anything to be flushed."""
        if self._paused is None:
            return False
        paused, self._paused = self._paused, None
        await paused
        return True


class _Paused:
    """A coroutine that was begun by hand and has stopped at `pause`; a task that awaits this goes on with it."""

    def __init__(self, rest: Any, pause: Any) -> None:
        self._rest = rest
        self._pause = pause

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            while True:
                try:
                    value = yield self._pause
                except BaseException as error:  # the task is cancelled: so is what it waits in
                    self._pause = self._rest.throw(error)
                else:
                    self._pause = self._rest.send(value)
        except StopIteration:
            return


def _gathered(events: Sequence[Event], finishes: Sequence[str]) -> list[Event]:
    """One event a choice: its texts and tokens put together."""
    texts: list[list[str]] = [[] for _ in finishes]
    tokens: list[list[Told]] = [[] for _ in finishes]
    for event in events:
        texts[event.at].append(event.text)
        tokens[event.at] += event.tokens
    return [Event(at, "".join(texts[at]), finish, tuple(tokens[at])) for at, finish in enumerate(finishes)]


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects (then ClientGoneError).

    The request's body must have been read: what `receive` tells next is the disconnect. It runs in the caller's task,
    cancelled by the one that watches, and takes that cancellation back: as `asyncio.timeout` does, for half of what a
    task of its own and the wait for both would cost.
    """
    task = asyncio.current_task()
    assert task is not None
    watch = _Watch(task)
    watcher = asyncio.create_task(watch.until_gone(receive))
    try:
        return await work
    except asyncio.CancelledError:
        if watch.gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()


class _Watch:
    """Cancels `task` when the client is `gone`."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.gone = False

    async def until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()


def _frame(found: JSON, name: str | None) -> bytes:
    line = b"data: " + _ENCODE(found) + b"\n\n"
    return f"event: {name}\n".encode() + line if name else line


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
