"""Payload: a RESP connection for the data path. Pages go out from their own memory and come in to a caller's buffer.

redis-py opens the connection (URL, TLS, user and password, time limits), then this module sends and receives on its
socket: redis-py itself would copy a page twice on its way in and take several times the CPU. One send and one receive
per page also means that a thread asks for Python's lock twice, not once per 64 KiB, beside an engine that wants it.
Nothing is sent again by itself; a connection that failed is dropped, and the next `send` opens another.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from redis import Redis, exceptions

from pipeline.broker.connect import REPLY_TIMEOUT_S
from pipeline.codec import Buffer
from pipeline.errors import FrameError

Word: TypeAlias = str | bytes | int
SLICE_S = 0.25  # longest time without a look at `check`
_HEAD_BYTES = 4096  # replies are a line or a header; of a payload at most this much is copied once more
_AGAIN = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_ERRORS: dict[bytes, type[exceptions.RedisError]] = {
    b"OOM": exceptions.OutOfMemoryError,
    b"NOSCRIPT": exceptions.NoScriptError,
    b"NOAUTH": exceptions.AuthenticationError,
    b"NOPERM": exceptions.NoPermissionError,
    b"READONLY": exceptions.ReadOnlyError,
    b"LOADING": exceptions.BusyLoadingError,
}


def command(*words: Word) -> bytes:
    """One command in RESP."""
    return b"*%d\r\n" % len(words) + b"".join(map(_word, words))


class Call:
    """Commands that begin with the same words, which are packed once."""

    def __init__(self, *words: Word) -> None:
        self._number = len(words)
        self._packed = b"".join(map(_word, words))

    def command(self, *words: Word) -> bytes:
        return b"*%d\r\n%b%b" % (self._number + len(words), self._packed, b"".join(map(_word, words)))


def store(key: str, payload: Buffer, ttl_ms: int) -> list[Buffer]:
    """SET key payload PX ttl_ms, the payload as it is."""
    head = b"*5\r\n" + _word("SET") + _word(key) + b"$%d\r\n" % len(payload)
    return [head, payload, b"\r\n" + _word("PX") + _word(ttl_ms)]


def _word(word: Word) -> bytes:
    data = word if isinstance(word, bytes) else str(word).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


class Link:
    """One connection of `client`'s pool, from the first `send` to `close`. Not for two threads at once.

    `check` is called every 250 ms while the peer makes us wait; what it raises, ends the connection. Raises redis'
    ConnectionError and TimeoutError; a server's refusal is returned as a value, so that a pipeline stays in step.
    """

    def __init__(self, client: Redis, check: Callable[[], None], patience_s: float = REPLY_TIMEOUT_S) -> None:
        self._pool: Any = client.connection_pool
        self._check = check
        self._patience_s = patience_s
        self._connection: Any = None
        self._socket: socket.socket | None = None
        self._head = bytearray(_HEAD_BYTES)
        self._view = memoryview(self._head)
        self._end = memoryview(bytearray(2))  # a line end that nobody looks at
        self._low = self._high = 0  # what of `_head` is not read yet
        self.due = 0  # replies that are still to be read

    def send(self, parts: Sequence[Buffer], replies: int) -> None:
        """Send the concatenation of `parts`, to which `replies` replies will come; returns when the kernel has it."""
        if self._connection is None:
            self._open()
        self.due += replies
        views = [memoryview(part).cast("B") for part in parts]
        while views:
            views = _behind(views, self._progress(self._write, views))

    def reply(self) -> Any:
        """The next reply: str for a status, bytes, int, None, a list, or a server's error as a value."""
        value = self._value()
        self.due -= 1
        return value

    def reply_into(self, target: memoryview) -> memoryview | Exception:
        """The next reply, a bulk string, in the first bytes of `target`; empty for none; a server's error as a value.

        One that is larger is not read, and the connection ends. Raises FrameError.
        """
        kind, rest = self._line()
        self.due -= 1
        if kind == b"-":
            return refusal(rest)
        if kind == b"_" or rest == b"-1":
            return target[:0]
        if kind != b"$":
            raise self._failed(f"a payload was asked for, {(kind + rest)[:32]!r} came")
        if int(rest) > len(target):
            self.drop()
            raise FrameError(f"wrong size of payload: expected at most {len(target)}, got {int(rest)}")
        return self._bulk(target, int(rest))

    def close(self) -> None:
        """Give the connection back to the pool; one with replies still to come is ended."""
        if self.due:
            self.drop()
        elif self._connection is not None:
            assert self._socket is not None
            self._socket.settimeout(self._connection.socket_timeout)
            self._release()

    def drop(self) -> None:
        """End the connection: what it would still say is not wanted."""
        if self._connection is not None:
            self._connection.disconnect()
            self._release()

    def _release(self) -> None:
        connection, self._connection, self._socket, self.due = self._connection, None, None, 0
        self._pool.release(connection)

    def _open(self) -> None:
        self._connection = self._pool.get_connection()
        connected: socket.socket = self._connection._sock  # no public way to the socket; the version is pinned
        if isinstance(connected, ssl.SSLSocket):
            connected.settimeout(SLICE_S)
        else:
            # The kernel's own time limits: with Python's a receive could not wait for all of a payload at once.
            connected.settimeout(None)
            limit = struct.pack("ll", 0, int(SLICE_S * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connected.setsockopt(socket.SOL_SOCKET, option, limit)
        self._socket, self._low, self._high = connected, 0, 0

    def _write(self, views: list[memoryview]) -> int:
        assert self._socket is not None
        if isinstance(self._socket, ssl.SSLSocket):  # TLS has no scatter send
            return self._socket.send(views[0]) if len(views[0]) else 0
        return self._socket.sendmsg(views)

    def _receive(self, targets: list[memoryview], flags: int = 0) -> int:
        assert self._socket is not None
        if isinstance(self._socket, ssl.SSLSocket):  # TLS has no scatter receive
            got = self._socket.recv_into(targets[0])
        else:
            got = self._socket.recvmsg_into(targets, 0, flags)[0]
        if not got:
            raise ConnectionResetError("the server closed the connection")
        return got

    def _progress(self, step: Callable[..., int], *args: Any) -> int:
        """`step`, again while the peer only makes us wait. The limit is on silence, not on the whole transfer."""
        deadline = time.monotonic() + self._patience_s
        try:
            while True:
                try:
                    return step(*args)
                except _AGAIN:
                    self._check()
                    if time.monotonic() >= deadline:
                        raise exceptions.TimeoutError(f"no byte moved for {self._patience_s:g} s") from None
        except OSError as error:
            raise self._failed(str(error)) from error
        except BaseException:
            self.drop()
            raise

    def _failed(self, why: str) -> exceptions.ConnectionError:
        self.drop()
        return exceptions.ConnectionError(why)

    def _line(self) -> tuple[bytes, bytes]:
        """Kind and rest of one line."""
        while (end := self._head.find(b"\r\n", self._low, self._high)) < 0:
            self._fill()
        line = bytes(self._view[self._low : end])
        self._low = end + 2
        return line[:1], line[1:]

    def _fill(self) -> None:
        held = self._high - self._low
        if held == _HEAD_BYTES:
            raise self._failed("the server sent a line without an end")
        self._view[:held] = self._view[self._low : self._high]
        self._low, self._high = 0, held
        self._high += self._progress(self._receive, [self._view[held:]])

    def _bulk(self, target: memoryview, size: int) -> memoryview:
        """`size` bytes and their line end: what is in the head first, the rest straight into `target`."""
        parts = _behind([target[:size], self._end], 0)
        while parts:
            got = self._take(parts[0]) or self._progress(self._receive, parts, socket.MSG_WAITALL)
            parts = _behind(parts, got)
        return target[:size]

    def _take(self, target: memoryview) -> int:
        count = min(len(target), self._high - self._low)
        target[:count] = self._view[self._low : self._low + count]
        self._low += count
        return count

    def _string(self, size: int) -> bytes:
        """A bulk string; most are in the head whole."""
        end = self._low + size
        if end + 2 > self._high:
            return bytes(self._bulk(memoryview(bytearray(size)), size))
        found = bytes(self._view[self._low : end])
        self._low = end + 2
        return found

    def _value(self) -> Any:
        kind, rest = self._line()
        if kind == b"$":
            return None if rest == b"-1" else self._string(int(rest))
        if kind in (b"*", b"~"):
            return None if rest == b"-1" else [self._value() for _ in range(int(rest))]
        if kind == b"%":  # RESP3 where RESP2 has pairs
            return [[self._value(), self._value()] for _ in range(int(rest))]
        return self._scalar(kind, rest)

    def _scalar(self, kind: bytes, rest: bytes) -> Any:
        if kind == b"+":
            return rest.decode()
        if kind == b":":
            return int(rest)
        if kind == b"-":
            return refusal(rest)
        if kind == b"_":
            return None
        raise self._failed(f"the server sent a reply of kind {kind!r}")


def refusal(text: bytes) -> exceptions.RedisError:
    """The exception of redis-py for what a server says behind the `-` of an error."""
    kind = _ERRORS.get(text.split(b" ", 1)[0], exceptions.ResponseError)
    return kind(text.decode(errors="replace"))


def _behind(views: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of `views` after their first `sent` bytes."""
    while views and sent >= len(views[0]):
        sent -= len(views[0])
        views = views[1:]
    return [views[0][sent:], *views[1:]] if views and sent else views
