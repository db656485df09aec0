"""Relay: one client request, its handoffs (one per choice) and the text events that come back.

Rules: (1) every handoff is read as fast as it comes, however slow the client is; the queue is bounded by
`max_tokens`. (2) Closing before the end cancels what is still running.
(3) A failure is raised from `next`, never turned into a finish.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import anyio

from pipeline.api.errors import Problem, ProblemError, sanitise
from pipeline.api.output import Output
from pipeline.contract import Contract
from pipeline.errors import BrokerError, CrossfillError
from pipeline.request import Request
from pipeline.routing import Wish

_CLOSE_S = 5.0  # a broker that does not answer must not hold a connection open
_log = logging.getLogger(__name__)


class Failure(Protocol):
    """An error that ended a handoff; the channel's `ErrorInfo` is one."""

    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def retryable(self) -> bool: ...
    @property
    def http_status(self) -> int: ...


class Entry(Protocol):
    """Tokens of one step; the channel's `TokenEntry` is one. The last has `finish` or `error`."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def finish(self) -> str | None: ...
    @property
    def error(self) -> Failure | None: ...
    @property
    def held_tokens(self) -> int | None: ...


class Model(Protocol):
    """Whose replicas are to answer; `Served` is one."""

    @property
    def name(self) -> str: ...
    @property
    def contract(self) -> Contract: ...


class Submission(Protocol):
    """One handoff in flight."""

    def __aiter__(self) -> AsyncIterator[Entry]: ...

    async def cancel(self, reason: str) -> None:
        """Ask for the end; the rest of the entries is not wanted."""
        ...

    async def stop(self, tokens: int) -> bool:
        """A stop string was completed by the `tokens`-th token. False: it had ended already."""
        ...

    async def trace(self) -> dict[str, Any] | None: ...

    async def close(self) -> None:
        """Everything wanted has been read: forget it."""
        ...


class Backend(Protocol):
    """What the edge needs of the rest of Crossfill."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def submit(self, request: Request, wish: Wish, model: Model) -> Submission:
        """Listen for its tokens, then enqueue. Raises CapacityError, BrokerError, InvalidParameterError."""
        ...

    async def require_ready(self, model: Model) -> None:
        """Raise what keeps a prompt of `model` from being served now: BrokerError, NoReplicaError."""
        ...

    async def status(self) -> dict[str, Any]:
        """Replicas, budget, queues and live handoffs, for people and benches."""
        ...


class Event(NamedTuple):
    """Text of choice number `at`; `finish` on its last. `text` may be empty: something happened, nothing to show."""

    at: int
    text: str
    finish: str | None = None


@dataclass(slots=True)
class Choice:
    """One prompt and its answer so far. `request` None: nothing is asked of an engine (echo with no tokens)."""

    request: Request | None
    output: Output
    prompt_tokens: int
    prefix: str = ""  # echoed prompt
    cached_tokens: int = 0
    trace: dict[str, Any] | None = None
    submission: Submission | None = field(default=None, repr=False)
    ended: bool = False  # D has said its last word, or was told that a stop string ended it

    @property
    def finish(self) -> str | None:
        return "length" if self.request is None else self.output.finish


class Relay:
    """`open`, `next` until `done`, `close`."""

    def __init__(
        self, backend: Backend, model: Model, choices: Sequence[Choice], wish: Wish, *, traced: bool = False
    ) -> None:
        self.choices = tuple(choices)
        self._model = model
        self._backend = backend
        self._wish = wish
        self._traced = traced
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []
        self._left = len(self.choices)
        self._closing = False

    @property
    def done(self) -> bool:
        """Every choice's last event was returned."""
        return self._left == 0

    async def open(self) -> None:
        """Submit every choice. Raises what the backend refuses; `close` is owed even then."""
        for index, choice in enumerate(self.choices):
            await self._begin(index, choice)

    async def close(self) -> None:
        """Cancel what has not ended, forget what has. Not to be run by a task that a disconnect cancels."""
        self._closing = True
        for reader in self._readers:
            reader.cancel()
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await asyncio.gather(*self._readers, return_exceptions=True)
        with anyio.move_on_after(_CLOSE_S, shield=True) as ending:
            await asyncio.gather(*(self._end(choice) for choice in self.choices if choice.submission))
        if ending.cancelled_caught:
            _log.warning("handoffs left to their lease: the broker does not answer")

    async def next(self, timeout_s: float | None = None) -> Event | None:
        """The next event of any choice; None after `timeout_s` of silence. Raises what ended a handoff."""
        try:
            async with asyncio.timeout(timeout_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event
        if event.finish:
            self._left -= 1
        return event

    async def _begin(self, index: int, choice: Choice) -> None:
        if choice.prefix or choice.request is None:
            self._events.put_nowait(Event(index, choice.prefix, choice.finish))
        if choice.request is not None:
            choice.submission = await self._backend.submit(choice.request, self._wish, self._model)
            self._readers.append(asyncio.create_task(self._read(index, choice, choice.submission)))

    async def _read(self, index: int, choice: Choice, submission: Submission) -> None:
        try:
            async for entry in submission:
                if self._closing:  # before Python 3.12 `asyncio.wait_for` swallows a cancel that meets its result
                    return
                text = self._take(choice, entry)
                if choice.output.finish:
                    await self._finish(choice, entry, submission)
                self._events.put_nowait(Event(index, text, choice.output.finish))
                if choice.output.finish:
                    return
            raise BrokerError("the token channel closed before the answer had ended")
        except Exception as error:
            self._events.put_nowait(error)

    def _take(self, choice: Choice, entry: Entry) -> str:
        if entry.error is not None:
            choice.ended = True
            raise _failed(entry.error)
        choice.ended = entry.finish is not None
        choice.cached_tokens = entry.held_tokens or choice.cached_tokens
        return choice.output.feed(entry.token_ids, entry.finish)

    async def _finish(self, choice: Choice, entry: Entry, submission: Submission) -> None:
        try:
            if entry.finish is None:  # ours: D does not know yet
                await submission.stop(choice.output.tokens)
                choice.ended = True
            if self._traced or entry.held_tokens is None:
                choice.trace = await submission.trace()
                choice.cached_tokens = choice.cached_tokens or (choice.trace or {}).get("reused_tokens", 0)
        except CrossfillError as error:  # the answer is complete all the same
            _log.warning("end of a handoff not settled: %s", error)

    async def _end(self, choice: Choice) -> None:
        assert choice.submission is not None
        try:
            try:
                if not choice.ended:
                    await choice.submission.cancel("the client is gone or a sibling choice failed")
            finally:
                await choice.submission.close()
        except CrossfillError as error:
            _log.warning("handoff left to its lease: %s", error)


def _failed(error: Failure) -> ProblemError:
    """A worker's words may name its paths and addresses."""
    return ProblemError(Problem(error.http_status, error.code, sanitise(error.message), None, error.retryable))
