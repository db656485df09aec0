"""Line: one RESP3 connection of an API process: commands, their replies, and what is published, on the event loop.

redis-py opens it (URL, TLS, user and password), then this protocol reads its transport. The rules here: replies come
in the order of the commands, so a channel that is subscribed to before a command is heard from before its reply; what
comes goes from the socket to whom it is for in one call. Nothing is sent twice; a line that is lost stays lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ConnectionError as AwayError
from redis.exceptions import RedisError

from pipeline.broker.payload import Word, command
from pipeline.broker.resp import Parser, Push, Reply

Hear = Callable[[bytes, bytes, bytes], None]
_COUNTED = (b"subscribe", b"unsubscribe")  # pushes that answer a command: one for each of its channels


class _Due(NamedTuple):
    """What will be answered next. `reply` None: a channel's subscription or its end. `asked_s`: by the loop's clock."""

    reply: asyncio.Future[Reply] | None
    asked_s: float


class Line(asyncio.Protocol):
    """From `open` to `lost`. `hear` is told the kind, channel and data of every push; it must not raise."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._parser = Parser()
        self._due: deque[_Due] = deque()
        self._connection: Any = None
        self._transport: Any = None
        self.lost: asyncio.Future[Exception] = self._loop.create_future()  # why, once it is

    @classmethod
    async def open(cls, client: AsyncRedis, hear: Hear) -> Self:
        """Of the server and with the options of `client`. Raises what redis-py does, OSError, RuntimeError."""
        line = cls(hear)
        connection: Any = client.connection_pool.make_connection()
        await connection.connect()
        line._connection, line._transport = connection, connection._writer.transport  # no public way to them
        line._transport.set_protocol(line)
        return line

    def ask(self, words: Sequence[Word]) -> asyncio.Future[Reply]:
        """Send one command. Its reply; the server's refusal, or ConnectionError once the line is lost, is raised."""
        reply: asyncio.Future[Reply] = self._loop.create_future()
        if self.lost.done():
            reply.set_exception(AwayError(str(self.lost.result())))
            return reply
        self._send(words, _Due(reply, self._loop.time()))
        return reply

    def subscribe(self, *channels: bytes) -> None:
        self._tell("SUBSCRIBE", channels)

    def unsubscribe(self, *channels: bytes) -> None:
        self._tell("UNSUBSCRIBE", channels)

    def waiting_s(self) -> float:
        """For how long the server has owed us the oldest reply; 0 when it owes none."""
        return self._loop.time() - self._due[0].asked_s if self._due else 0.0

    def end(self, why: Exception) -> None:
        """Close it. Every reply that is due fails: the server may have done what was asked, or not."""
        if self.lost.done():
            return
        self.lost.set_result(why)
        due, self._due = self._due, deque()
        for reply, _ in due:
            if reply and not reply.done():
                reply.set_exception(AwayError(f"the connection was lost: {why}"))
        if self._connection is not None:
            self._transport.abort()  # what was not sent is not sent any more
            self._connection._close()

    def data_received(self, data: bytes) -> None:
        try:
            for found in self._parser.feed(data):
                if isinstance(found, Push):
                    self._pushed(found)
                else:
                    self._answered(found)
        except Exception as error:
            self.end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.end(error or ConnectionResetError("the broker closed it"))

    def _tell(self, name: str, channels: Sequence[bytes]) -> None:
        if channels and not self.lost.done():
            due = _Due(None, self._loop.time())
            self._send((name, *channels), *(due for _ in channels))

    def _send(self, words: Sequence[Word], *due: _Due) -> None:
        self._due.extend(due)
        try:
            self._transport.write(command(*words))
        except (OSError, RuntimeError) as error:  # uvloop's, where the peer has reset the connection a moment ago
            self.end(error)

    def _pushed(self, items: Push) -> None:
        """Raises ValueError, IndexError for the answer to a subscription that is not due."""
        if items[0] in _COUNTED and self._due.popleft().reply is not None:
            raise ValueError("a command was answered by a subscription")
        if len(items) == 3:
            self._hear(*items)

    def _answered(self, found: Reply) -> None:
        """Raises what the server says where no reply is due: it refuses a subscription."""
        reply = self._due.popleft().reply
        if reply is None:
            raise found if isinstance(found, RedisError) else ValueError("a subscription was answered by a reply")
        if reply.done():  # nobody waits for it any more
            return
        if isinstance(found, RedisError):
            reply.set_exception(found)
        else:
            reply.set_result(found)
