"""Channel: token ids from D to the API, a log plus pub/sub, so a late or slow reader loses nothing.

`emit.lua` appends an entry to the log and publishes `<index> <entry>`. A reader subscribes before the jobs are
enqueued, takes what is published in order, drops what it has, and reads the log wherever it sees a gap or silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from pipeline import logprob
from pipeline.broker import keys
from pipeline.broker.connect import HEALTH_CHECK_S
from pipeline.broker.push import PushParser
from pipeline.errors import BrokerError, CrossfillError, PeerError
from pipeline.logprob import TokenLogprob

_HEAL_S = 0.5  # a reader that heard nothing between two ticks of this looks into the log by itself
_MOST_PATIENT = 4  # ticks: nothing is lost as a rule, and two commands of every waiting stream add up
_READ_BYTES = 1 << 16
_RECONNECT_S = 0.2
_CONFIRM_S = 2.0  # a submit is refused after this when the broker is silent
_PATIENCE_S = 2.0  # how long a reader waits for a broker that is away
# uvloop raises RuntimeError where a connection that was reset meanwhile is written to, and redis-py lets it through.
_AWAY = (RedisError, OSError, RuntimeError)
_log = logging.getLogger(__name__)
_GONE = 2  # looks in a row that find neither tokens nor the record


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it crosses processes."""

    code: str
    message: str
    retryable: bool
    http_status: int

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        if isinstance(error, CrossfillError):
            return cls(error.code, str(error), error.retryable, error.http_status)
        return cls("internal_error", f"{type(error).__name__}: {error}", False, 500)


class TokenEntry(msgspec.Struct, frozen=True):
    """Tokens of one engine step for one `sample`. `seq` counts the tokens of all samples before it.

    `finish` is the sample's; `more` beside it: other samples go on. The last entry has `error`, or `finish` alone.
    `held_tokens`, on the last entry: prompt tokens whose KV the decode engine already held. `logprobs` stand beside
    `token_ids` where they were asked for.
    """

    seq: int
    token_ids: tuple[int, ...]
    finish: str | None = None
    error: ErrorInfo | None = None
    held_tokens: int | None = None
    sample: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    more: bool = False

    @property
    def last(self) -> bool:
        return self.error is not None or (self.finish is not None and not self.more)

    def encode(self) -> str:
        """What is not there, or as it mostly is, is left out."""
        fields = {
            "seq": self.seq,
            "token_ids": self.token_ids,
            "finish": self.finish,
            "error": asdict(self.error) if self.error else None,
            "held_tokens": self.held_tokens,
            "sample": self.sample or None,
            "logprobs": None if self.logprobs is None else logprob.encode(self.logprobs),
            "more": self.more or None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}, separators=(",", ":"))


Count = Annotated[int, msgspec.Meta(ge=0)]


class _Wire(msgspec.Struct):
    """What `TokenEntry.encode` writes."""

    seq: Count
    token_ids: tuple[Count, ...]
    finish: str | None = None
    error: ErrorInfo | None = None
    held_tokens: Count | None = None
    sample: Count = 0
    logprobs: list[list[int | float]] | None = None
    more: bool = False


_DECODER = msgspec.json.Decoder(_Wire)


def decode(text: bytes | str) -> TokenEntry:
    """Raises PeerError when `text` is not an entry: whoever may write to the broker could have put anything there."""
    try:
        raw = _DECODER.decode(text)
        logprobs = None if raw.logprobs is None else logprob.decode(raw.logprobs)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise PeerError(f"an entry of the token log is not readable: {type(error).__name__}: {error}") from None
    return TokenEntry(raw.seq, raw.token_ids, raw.finish, raw.error, raw.held_tokens, raw.sample, logprobs, raw.more)


Published = tuple[int, bytes]  # index in the log, entry


class Inbox:
    """What was published for one reader and not yet taken. Unbounded: an answer has a bounded number of tokens."""

    def __init__(self) -> None:
        self._published: list[Published] = []
        self._event = asyncio.Event()
        self._silent = 0  # ticks since something was taken
        self._patience = 1  # and how many of them wake nobody

    def put(self, published: Published) -> None:
        self._published.append(published)
        self._patience = 1
        self._event.set()

    def wake(self) -> None:
        """Let the reader look for itself."""
        self._event.set()

    def hurry(self) -> None:
        """Be woken by the next silence as by the first."""
        self._patience = 1

    def tick(self) -> None:
        """Silence wakes the reader: after a tick or two at first, later less often."""
        self._silent += 1
        if self._silent > self._patience:
            self._patience = min(2 * self._patience, _MOST_PATIENT)
            self._event.set()

    async def take(self) -> list[Published]:
        """All there is, in the order of its coming; nothing after a silence."""
        await self._event.wait()
        self._event.clear()
        self._silent = 0
        taken, self._published = self._published, []
        return taken


class TokenHub:
    """One pub/sub connection of an API process, shared by all its readers."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._pubsub: PubSub | None = None  # the living subscription; only the pump makes and ends one
        self._inboxes: dict[bytes, Inbox] = {}
        self._subscribed: dict[bytes, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(step) for step in (self._pump(), self._tick())]

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def open(self, handoff_id: str) -> Inbox:
        """Subscribe; returns once the server has confirmed it. Raises BrokerError."""
        channel = keys.HandoffKeys(handoff_id).notify.encode()
        inbox = self._inboxes[channel] = Inbox()
        ready = self._subscribed[channel] = asyncio.Event()
        try:
            async with asyncio.timeout(_CONFIRM_S):
                await self._tell("SUBSCRIBE", channel)
                await ready.wait()
        except TimeoutError:
            await self.drop(handoff_id)
            raise BrokerError(f"the broker did not confirm a subscription within {_CONFIRM_S:g} s") from None
        except asyncio.CancelledError:
            await self.drop(handoff_id)
            raise
        finally:
            self._subscribed.pop(channel, None)
        return inbox

    async def drop(self, handoff_id: str) -> None:
        channel = keys.HandoffKeys(handoff_id).notify.encode()
        self._inboxes.pop(channel, None)
        await self._tell("UNSUBSCRIBE", channel)

    async def log(self, handoff_id: str, start: int) -> list[bytes]:
        """Entries of the log from index `start` on. Raises BrokerError."""
        try:
            entries = await _uncancelled(self._client.lrange(keys.HandoffKeys(handoff_id).tokens, start, -1))
        except _AWAY as error:
            raise BrokerError(f"cannot read the token log: {error}") from error
        return list(entries)

    async def known(self, handoff_id: str) -> bool:
        """Whether the ledger still has the handoff. Raises BrokerError."""
        try:
            return bool(await _uncancelled(self._client.exists(keys.HandoffKeys(handoff_id).record)))
        except _AWAY as error:
            raise BrokerError(f"cannot read the ledger: {error}") from error

    async def _tell(self, command: str, channel: bytes) -> None:
        """Send it on the living subscription. Without one nothing is sent: the next one begins with every inbox.

        Past redis-py's own way, which connects anew where a connection is broken: beside the pump, which does so too,
        two tasks then read one connection and every request fails from there on.
        """
        connection: Any = self._pubsub.connection if self._pubsub else None
        if connection is not None and connection.is_connected:
            with contextlib.suppress(Exception):  # the pump meets the same trouble, and mends it
                await _uncancelled(connection.send_command(command, channel, check_health=False))

    async def _pump(self) -> None:
        """Keep a subscription to every inbox, whatever the network, the server or redis-py does."""
        while not self._closing:
            try:
                await self._listen()
            except Exception as error:
                _log.warning("token channels: %s: %s; subscribing again", type(error).__name__, error)
                await asyncio.sleep(_RECONNECT_S)  # readers heal from the log meanwhile

    async def _listen(self) -> None:
        async with self._client.pubsub() as pubsub:
            told = {f"{keys.PREFIX}:hub".encode(), *self._inboxes}  # the first is there when no other is
            await pubsub.subscribe(*told)
            self._pubsub = pubsub
            try:
                for channel in self._inboxes.keys() - told:  # opened while we subscribed
                    await self._tell("SUBSCRIBE", channel)
                await self._read(pubsub.connection)
            finally:
                self._pubsub = None

    async def _read(self, connection: Any) -> None:
        """Past redis-py's own reader, which is never begun on this connection: see `push`."""
        parser = PushParser()
        while not self._closing:
            data: bytes = await connection._reader.read(_READ_BYTES)
            if not data:
                raise BrokerError("the broker closed the connection")
            for kind, channel, *rest in (items for items in parser.feed(data) if len(items) == 3):
                self._dispatch(kind, channel, *rest)

    def _dispatch(self, kind: bytes, channel: bytes, data: bytes) -> None:
        if kind == b"subscribe" and channel in self._subscribed:
            self._subscribed[channel].set()
        elif kind == b"subscribe" and channel in self._inboxes:  # anew: what was published meanwhile is in the log
            self._inboxes[channel].wake()
        elif kind == b"message" and channel in self._inboxes:
            index, _, entry = data.partition(b" ")
            if index.isdigit():  # nobody else's message may end the reading of all
                self._inboxes[channel].put((int(index), entry))

    async def _tick(self) -> None:
        """Wake the readers that have heard nothing, and keep an idle connection in use: one timer for all of them."""
        loop = asyncio.get_running_loop()
        ping_s = loop.time() + HEALTH_CHECK_S
        while True:
            await asyncio.sleep(_HEAL_S)
            for inbox in self._inboxes.values():
                inbox.tick()
            if loop.time() >= ping_s:
                ping_s = loop.time() + HEALTH_CHECK_S
                await self._tell("PING", b"hub")


class TokenReader:
    """Every entry of one handoff, in order, exactly once, up to and with the last."""

    def __init__(self, hub: TokenHub, handoff_id: str) -> None:
        self._hub = hub
        self._id = handoff_id
        self._next = 0
        self._missing = 0
        self._away_s = math.inf  # since when the broker has not answered

    async def __aenter__(self) -> Self:
        self._inbox = await self._hub.open(self._id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._hub.drop(self._id)

    async def __aiter__(self) -> AsyncIterator[TokenEntry]:
        while True:
            for raw in await self._wait():
                self._next += 1
                entry = decode(raw)
                yield entry
                if entry.last:
                    return

    async def _wait(self) -> list[bytes]:
        """Entries that follow what was read, at once where they are there; none where all of it was known."""
        if not (published := await self._inbox.take()):
            return await self._heal()
        fresh: list[bytes] = []
        for index, entry in published:
            if index > self._next + len(fresh):
                return await self._heal()
            if index == self._next + len(fresh):
                fresh.append(entry)
        return fresh

    async def _heal(self) -> list[bytes]:
        """A gap, or silence for a while: read the log. A handoff gone from the ledger will say nothing more.

        A broker that is away is waited for a moment: a reset connection, or a failover, is not the end of an answer.
        """
        began_s = asyncio.get_running_loop().time()
        try:
            entries = await self._hub.log(self._id, self._next)
            self._missing = 0 if entries or await self._hub.known(self._id) else self._missing + 1
        except BrokerError:
            self._away_s = min(self._away_s, began_s)
            if asyncio.get_running_loop().time() - self._away_s >= _PATIENCE_S:
                raise
            self._inbox.hurry()
            return []
        self._away_s = math.inf
        if self._missing >= _GONE:
            raise BrokerError("the broker has lost this request: it was restarted or emptied")
        return entries


async def _uncancelled(command: Awaitable[Any]) -> Any:
    """Run a redis-py command in a task of its own: a cancellation reaches us, never redis-py.

    It waits by `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that meets a result; the
    handoff of a client long gone then ran to its end.
    """
    return await asyncio.shield(asyncio.ensure_future(command))
