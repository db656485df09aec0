"""Relay: one client request, its handoffs (one per prompt, for all its samples) and the text events that come back.

Rules: (1) every handoff is read as fast as it comes, however slow the client is; what waits is bounded by
`max_tokens`. (2) Closing before the end cancels what is still running.
(3) A failure is raised from `next`, never turned into a finish. (4) An entry becomes text in the call that tells of it;
the one task that an answer has is woken for the client's sake only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import anyio

from pipeline.api.errors import Problem, ProblemError, sanitise
from pipeline.api.output import Output, Told
from pipeline.contract import Contract
from pipeline.errors import BrokerError, CrossfillError, InvalidParameterError, UnsupportedFeatureError
from pipeline.logprob import TokenLogprob
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
    """Tokens of one step of one sample; the channel's `TokenEntry` is one."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def finish(self) -> str | None: ...
    @property
    def error(self) -> Failure | None: ...
    @property
    def held_tokens(self) -> int | None: ...
    @property
    def sample(self) -> int: ...
    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None: ...
    @property
    def last(self) -> bool:
        """Nothing of any sample follows."""
        ...


class Model(Protocol):
    """Whose replicas are to answer; `Served` is one."""

    @property
    def name(self) -> str: ...
    @property
    def contract(self) -> Contract: ...


Listener = Callable[[Entry | Exception], None]
Sink = Callable[["Event"], bool]


class Submission(Protocol):
    """One handoff in flight."""

    def listen(self, listener: Listener) -> None:
        """`listener` is called with each entry as it comes, on the event loop, up to and with the last; or with the
        error that ends it. It must not raise."""
        ...

    async def cancel(self, reason: str) -> None:
        """Ask for the end; the rest of the entries is not wanted."""
        ...

    async def stop(self) -> bool:
        """Stop strings have ended every sample. False: it had ended already."""
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

    async def explain(self, model: Model, tokens: int) -> list[Mapping[str, object]]:
        """What each way would cost a prompt of `tokens` now, the best first. Raises BrokerError."""
        ...

    async def status(self) -> dict[str, Any]:
        """Replicas, budget, queues and live handoffs, for people and benches."""
        ...

    async def handoffs(self, recent: int) -> list[dict[str, Any]]:
        """Traces of live handoffs, and of at most `recent` that ended lately."""
        ...

    async def handoff(self, handoff_id: str) -> dict[str, Any] | None:
        """The trace of one, live or ended lately."""
        ...


class Event(NamedTuple):
    """Text of choice number `at`; `finish` on its last. `text` may be empty: something happened, nothing to show."""

    at: int
    text: str
    finish: str | None = None
    tokens: tuple[Told, ...] = ()


@dataclass(slots=True)
class Prompt:
    """One prompt and its answers so far, one `Output` a sample.

    `request` None: nothing is asked of an engine (echo with no tokens). `params`: which of the client's parameters
    asked for a feature, where the two have different names.
    """

    request: Request | None
    outputs: tuple[Output, ...]
    tokens: int
    echo: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    cached_tokens: int = 0
    trace: dict[str, Any] | None = None
    submission: Submission | None = field(default=None, repr=False)
    ended: bool = False  # D has said its last word, or was told that stop strings ended every sample
    over: bool = False  # what D still says is not wanted

    @property
    def finishes(self) -> list[str | None]:
        return ["length" if self.request is None else output.finish for output in self.outputs]

    @property
    def whole(self) -> bool:
        """Every sample has ended."""
        return all(self.finishes)


class Relay:
    """`open`, `next` until `done`, `close`. Choices are numbered over all samples of all prompts."""

    def __init__(
        self, backend: Backend, model: Model, prompts: Sequence[Prompt], wish: Wish, *, traced: bool = False
    ) -> None:
        self.prompts = tuple(prompts)
        self._model = model
        self._backend = backend
        self._wish = wish
        self._traced = traced
        self._events: list[Event | Exception] = []  # not yet returned
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._told_s = 0.0  # by the loop's clock: when the sink took an event last
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._finishers: list[asyncio.Task[None]] = []
        self._left = sum(len(prompt.outputs) for prompt in self.prompts)
        self._closing = False

    @property
    def done(self) -> bool:
        """Every choice's last event was returned."""
        return self._left == 0

    @property
    def finishes(self) -> list[str]:
        """Of every choice, in order; of those not finished an empty one."""
        return [finish or "" for prompt in self.prompts for finish in prompt.finishes]

    async def open(self) -> None:
        """Submit every prompt. Raises what the backend refuses; `close` is owed even then."""
        first = 0
        for prompt in self.prompts:
            await self._begin(first, prompt)
            first += len(prompt.outputs)

    async def close(self) -> None:
        """Cancel what has not ended, forget what has. Not to be run by a task that a disconnect cancels."""
        self._closing = True
        for finisher in self._finishers:
            finisher.cancel()
        if self._finishers:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await asyncio.gather(*self._finishers, return_exceptions=True)
        owed = [self._end(prompt) for prompt in self.prompts if prompt.submission]
        with anyio.move_on_after(_CLOSE_S, shield=True) as ending:
            if len(owed) == 1:  # needs no task of its own
                await owed[0]
            else:
                await asyncio.gather(*owed)
        if ending.cancelled_caught:
            _log.warning("handoffs left to their lease: the broker does not answer")

    async def next(self, timeout_s: float | None = None) -> list[Event]:
        """Every event that is there, of any choice; none after `timeout_s` of silence.

        Raises what ended a handoff, once what came before it was returned.
        """
        if not self._events and self._failure is None:
            await self._wait(timeout_s)
        found = self._ready() if self._failure is None else []
        if not found and self._failure is not None:
            raise self._failure
        return found

    def pour(self, sink: Sink) -> None:
        """While `next` is waited for, each event but a choice's last goes to `sink`, in the call that tells of it.

        False from it wakes the waiter, with nothing; what it raises is raised from `next`.
        """
        self._sink = sink

    async def _wait(self, timeout_s: float | None) -> None:
        """For an event, or a silence. By a bare timer: `asyncio.timeout` costs as much as all else for a token."""
        self._loop = asyncio.get_running_loop()
        self._told_s = self._loop.time()
        self._waiter = self._loop.create_future()
        if timeout_s is not None:
            self._timer = self._loop.call_later(timeout_s, self._ring, timeout_s)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._timer:
                self._timer.cancel()
                self._timer = None

    def _ring(self, timeout_s: float) -> None:
        """The silence counts from what was poured last."""
        left_s = self._told_s + timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._ring, timeout_s)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _put(self, event: Event | Exception) -> None:
        if not self._poured(event):
            self._events.append(event)
            self._wake()

    def _poured(self, event: Event | Exception) -> bool:
        """Whether the sink has taken it. Nothing goes past what still waits for the task."""
        idle = self._waiter is not None and not self._waiter.done() and not self._events
        if not idle or self._sink is None or isinstance(event, Exception) or event.finish is not None:
            return False
        self._told_s = self._loop.time()
        try:
            if not self._sink(event):
                self._wake()
        except Exception as error:
            self._events.append(error)
            self._wake()
        return True

    def _ready(self) -> list[Event]:
        events, self._events = self._events, []
        found: list[Event] = []
        for event in events:
            if isinstance(event, Exception):
                self._failure = event
                break
            self._left -= event.finish is not None
            found.append(event)
        return found

    async def _begin(self, first: int, prompt: Prompt) -> None:
        for index, finish in enumerate(prompt.finishes):
            if prompt.echo or prompt.request is None:
                self._put(Event(first + index, prompt.echo, finish))
        if prompt.request is not None:
            prompt.submission = await self._submit(prompt.request, prompt.params)
            prompt.submission.listen(partial(self._hear, first, prompt))

    async def _submit(self, request: Request, params: Mapping[str, str]) -> Submission:
        """Raises what the backend does; a feature that no engine has is named as the client knows it."""
        try:
            return await self._backend.submit(request, self._wish, self._model)
        except UnsupportedFeatureError as error:
            param = params.get(error.feature, error.feature)
            message = str(error).replace(f"`{error.feature}`", f"`{param}`")
            raise InvalidParameterError(param, message, code=error.reason) from error

    def _hear(self, first: int, prompt: Prompt, heard: Entry | Exception) -> None:
        if self._closing or prompt.over:
            return
        try:
            if isinstance(heard, Exception):
                raise heard
            self._tell(first, prompt, heard)
        except Exception as error:
            prompt.over = True
            self._put(error)

    def _tell(self, first: int, prompt: Prompt, entry: Entry) -> None:
        output = prompt.outputs[entry.sample]
        prompt.ended = entry.last
        if entry.error is not None:
            raise _failed(entry.error)
        # None: a stop string ended this sample, D goes on for its siblings
        event = None if output.finish else self._event(first, prompt, entry)
        if prompt.ended and not prompt.whole:  # nothing would ever come for the others
            raise BrokerError("the token channel closed before the answer had ended")
        if event is None:
            return
        prompt.over = prompt.whole
        if prompt.over and (self._traced or not entry.last or entry.held_tokens is None):
            self._finishers.append(asyncio.create_task(self._finish(prompt, entry, event)))
        else:
            self._put(event)

    def _event(self, first: int, prompt: Prompt, entry: Entry) -> Event:
        output = prompt.outputs[entry.sample]
        prompt.cached_tokens = entry.held_tokens or prompt.cached_tokens
        piece = output.feed(entry.token_ids, entry.finish, entry.logprobs)
        return Event(first + entry.sample, piece.text, output.finish, piece.tokens)

    async def _finish(self, prompt: Prompt, entry: Entry, event: Event) -> None:
        """What is owed before the last event of a prompt is told: D's end, and what the ledger knows of it."""
        assert prompt.submission is not None
        try:
            if not entry.last:  # ours: D does not know yet
                # Refused where another D is about to take over: it is cancelled then.
                prompt.ended = await prompt.submission.stop()
            if self._traced or entry.held_tokens is None:
                prompt.trace = await prompt.submission.trace()
                prompt.cached_tokens = prompt.cached_tokens or (prompt.trace or {}).get("reused_tokens", 0)
        except CrossfillError as error:  # the answer is complete all the same
            _log.warning("end of a handoff not settled: %s", error)
        except Exception as error:
            self._put(error)
            return
        self._put(event)

    async def _end(self, prompt: Prompt) -> None:
        assert prompt.submission is not None
        try:
            try:
                if not prompt.ended:
                    await prompt.submission.cancel("the client is gone or a sibling prompt failed")
            finally:
                await prompt.submission.close()
        except CrossfillError as error:
            _log.warning("handoff left to its lease: %s", error)


def _failed(error: Failure) -> ProblemError:
    """A worker's words may name its paths and addresses."""
    return ProblemError(Problem(error.http_status, error.code, sanitise(error.message), None, error.retryable))
