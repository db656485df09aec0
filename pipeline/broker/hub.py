"""Hub: the token channels of one API process, so that a late or slow reader loses nothing.

A reader subscribes before the jobs are enqueued. It tells its listener what is published in order, drops what it has,
and reads the log wherever it sees a gap or silence. The rule here: what is published goes from the socket to the
listener in one call on the event loop; a token costs no task, no lock and no timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from pipeline.broker import keys
from pipeline.broker.channel import TokenEntry, decode
from pipeline.broker.connect import HEALTH_CHECK_S
from pipeline.broker.push import PushParser
from pipeline.errors import BrokerError, PeerError

_HEAL_S = 0.5  # a reader that heard nothing between two ticks of this looks into the log by itself
_MOST_PATIENT = 4  # ticks: nothing is lost as a rule, and two commands of every waiting stream add up
_READ_BYTES = 1 << 16
_RECONNECT_S = 0.2
_CONFIRM_S = 2.0  # a submit is refused after this when the broker is silent
_PATIENCE_S = 2.0  # how long a reader waits for a broker that is away
# uvloop raises RuntimeError where a connection that was reset meanwhile is written to, and redis-py lets it through.
_AWAY = (RedisError, OSError, RuntimeError)
_GONE = 2  # looks in a row that find neither tokens nor the record
_log = logging.getLogger(__name__)

Heard = TokenEntry | Exception
Listener = Callable[[Heard], None]


class TokenHub:
    """One pub/sub connection of an API process, shared by all its readers."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._pubsub: PubSub | None = None  # the living subscription; only the pump makes and ends one
        self._readers: dict[bytes, TokenReader] = {}
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

    async def open(self, handoff_id: str, reader: TokenReader) -> None:
        """Subscribe; returns once the server has confirmed it. Raises BrokerError."""
        channel = keys.HandoffKeys(handoff_id).notify.encode()
        self._readers[channel] = reader
        ready = self._subscribed[channel] = asyncio.Event()
        try:
            async with asyncio.timeout(_CONFIRM_S):
                self._tell("SUBSCRIBE", channel)
                await ready.wait()
        except TimeoutError:
            self.drop(handoff_id)
            raise BrokerError(f"the broker did not confirm a subscription within {_CONFIRM_S:g} s") from None
        except asyncio.CancelledError:
            self.drop(handoff_id)
            raise
        finally:
            self._subscribed.pop(channel, None)

    def drop(self, handoff_id: str) -> None:
        channel = keys.HandoffKeys(handoff_id).notify.encode()
        self._readers.pop(channel, None)
        self._tell("UNSUBSCRIBE", channel)

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

    def _tell(self, *command: str | bytes) -> None:
        """Send it on the living subscription. Without one nothing is sent: the next one begins with every reader.

        Past redis-py's own way: it connects anew where a connection is broken. Beside the pump, which does so too, two
        tasks then read one connection and every request fails from there on. It also costs two tasks a command.
        """
        connection: Any = self._pubsub.connection if self._pubsub else None
        if connection is not None and connection.is_connected:
            with contextlib.suppress(Exception):  # the pump meets the same trouble, and mends it
                connection._writer.writelines(connection.pack_command(*command))

    async def _pump(self) -> None:
        """Keep a subscription to every reader, whatever the network, the server or redis-py does."""
        while not self._closing:
            try:
                await self._listen()
            except Exception as error:
                _log.warning("token channels: %s: %s; subscribing again", type(error).__name__, error)
                await asyncio.sleep(_RECONNECT_S)  # readers heal from the log meanwhile

    async def _listen(self) -> None:
        async with self._client.pubsub() as pubsub:
            told = {f"{keys.PREFIX}:hub".encode(), *self._readers}  # the first is there when no other is
            await pubsub.subscribe(*told)
            self._pubsub = pubsub
            try:
                for channel in self._readers.keys() - told:  # opened while we subscribed
                    self._tell("SUBSCRIBE", channel)
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
        elif kind == b"subscribe" and channel in self._readers:  # anew: what was published meanwhile is in the log
            self._readers[channel].look()
        elif kind == b"message" and channel in self._readers:
            index, _, entry = data.partition(b" ")
            if index.isdigit():  # nobody else's message may end the reading of all
                self._readers[channel].put(int(index), entry)

    async def _tick(self) -> None:
        """Tell the readers of the time that passes, and keep an idle connection in use: one timer for all of them."""
        loop = asyncio.get_running_loop()
        ping_s = loop.time() + HEALTH_CHECK_S
        while True:
            await asyncio.sleep(_HEAL_S)
            for reader in tuple(self._readers.values()):
                reader.tick()
            if loop.time() >= ping_s:
                ping_s = loop.time() + HEALTH_CHECK_S
                self._tell("PING", "hub")


class TokenReader:
    """Every entry of one handoff, in order, exactly once, up to and with the last; or the error that ended it.

    What comes before somebody listens is kept: an answer has a bounded number of tokens. Until then nothing is looked
    for: the handoff may not have been submitted yet, however long that takes.
    """

    def __init__(self, hub: TokenHub, handoff_id: str) -> None:
        self._hub = hub
        self._id = handoff_id
        self._listener: Listener | None = None
        self._early: list[Heard] = []
        self._ahead: dict[int, bytes] = {}  # published behind a gap
        self._next = 0
        self._over = False
        self._looking: asyncio.Task[None] | None = None
        self._again = False  # a look was asked for while one was under way
        self._silent = 0  # ticks since something was published or looked for
        self._patience = 1  # and how many of them are let pass
        self._missing = 0
        self._away_s = math.inf  # since when the broker has not answered
        self.finished = False  # the last entry has come, and it is no error

    async def __aenter__(self) -> Self:
        await self._hub.open(self._id, self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        if self._looking:
            self._looking.cancel()
        self._hub.drop(self._id)

    def listen(self, listener: Listener) -> None:
        """`listener` is told all that has come, at once, and all that comes. It must not raise."""
        self._listener = listener
        early, self._early = self._early, []
        for heard in early:
            listener(heard)
        if self._ahead:
            self.look()

    def put(self, index: int, raw: bytes) -> None:
        """`raw` was published as entry number `index` of the log."""
        self._silent, self._patience = 0, 1
        if index == self._next:
            self._take(raw)
        elif index > self._next:
            self._ahead[index] = raw
            self.look()

    def tick(self) -> None:
        """Silence makes it look: after a tick or two at first, later less often."""
        if self._listener is None:
            return
        self._silent += 1
        if self._silent > self._patience:
            self._patience = min(2 * self._patience, _MOST_PATIENT)
            self.look()

    def look(self) -> None:
        """Read the log; once more where that is being done, since it may have passed what is meant."""
        self._silent = 0
        if self._over or self._listener is None:
            return
        self._again = True
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._heal())

    def _take(self, raw: bytes) -> None:
        self._next += 1
        try:
            self._tell(decode(raw))
        except PeerError as error:
            self._tell(error)

    def _tell(self, heard: Heard) -> None:
        if self._over:
            return
        if isinstance(heard, Exception):
            self._over = True
        elif heard.last:
            self._over, self.finished = True, heard.error is None
        (self._listener or self._early.append)(heard)

    async def _heal(self) -> None:
        while self._again and not self._over:
            self._again = False
            await self._read_log()

    async def _read_log(self) -> None:
        """A gap, or silence for a while: read the log. A handoff gone from the ledger will say nothing more.

        A broker that is away is waited for a moment: a reset connection, or a failover, is not the end of an answer.
        """
        began_s, start = asyncio.get_running_loop().time(), self._next
        try:
            entries = await self._hub.log(self._id, start)
            self._missing = 0 if entries or await self._hub.known(self._id) else self._missing + 1
        except BrokerError as error:
            self._away_s = min(self._away_s, began_s)
            self._patience = 1
            if asyncio.get_running_loop().time() - self._away_s >= _PATIENCE_S:
                self._tell(error)
            return
        self._away_s = math.inf
        self._fill(enumerate(entries, start))
        if self._missing >= _GONE:
            self._tell(BrokerError("the broker has lost this request: it was restarted or emptied"))

    def _fill(self, found: Iterable[tuple[int, bytes]]) -> None:
        """What the log has, then what was published meanwhile; behind another gap it waits for the next look."""
        for index, raw in sorted({**self._ahead, **dict(found)}.items()):
            if index == self._next:
                self._take(raw)
        self._ahead = {index: raw for index, raw in self._ahead.items() if index > self._next}


async def _uncancelled(command: Awaitable[Any]) -> Any:
    """Run a redis-py command in a task of its own: a cancellation reaches us, never redis-py.

    It waits by `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that meets a result; the
    handoff of a client long gone then ran to its end.
    """
    return await asyncio.shield(asyncio.ensure_future(command))
