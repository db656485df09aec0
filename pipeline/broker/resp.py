"""Resp: what a RESP3 connection says, read from its bytes: replies, and pushes between them. Knows no socket.

The subset that our commands are answered in: one-line replies, bulk strings, arrays of those, and pushes of flat items.
redis-py's own reader takes about 100 us of CPU a message, this one 3; every token of an answer is a message.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from redis.exceptions import RedisError

from pipeline.broker.payload import refusal

_BULK, _PUSH, _ARRAY, _ERROR, _INTEGER, _NULL, _STATUS = b"$>*-:_+"

Scalar: TypeAlias = bytes | int | RedisError | None
Reply: TypeAlias = Scalar | list[Scalar]


class Push(list[bytes]):
    """The items of a message that nobody asked for, `[b"message", channel, data]` for example."""


class _Read(NamedTuple):
    value: Reply | Push
    end: int  # where the next message starts


class Parser:
    """`feed` what has come, get every reply and push that is whole, in order. A server's refusal is a value: redis-py's
    exception. Raises ValueError for bytes that are no protocol of ours."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Reply | Push]:
        if self._rest:
            data = self._rest + data
        at, found = 0, list[Reply | Push]()
        while (read := _message(data, at)) is not None:
            value, at = read
            found.append(value)
        self._rest = data[at:]
        return found


def _message(data: bytes, at: int) -> _Read | None:
    """The message that starts at `at`; None while it is not whole."""
    if (end := data.find(b"\r\n", at)) < 0:
        return None
    kind = data[at]
    if kind == _PUSH:
        return _push(data, end + 2, int(data[at + 1 : end]))
    if kind == _ARRAY:
        return _array(data, end + 2, int(data[at + 1 : end]))
    return _scalar(data, at, end)


def _push(data: bytes, at: int, count: int) -> _Read | None:
    """Every item as bytes, whatever its kind: a token costs no more than this loop."""
    items = Push()
    for _ in range(count):
        if (end := data.find(b"\r\n", at)) < 0:
            return None
        start, stop = at + 1, end
        if data[at] == _BULK and (size := int(data[start:end])) >= 0:
            start = end + 2
            stop = start + size
        if len(data) < stop + 2:
            return None
        items.append(data[start:stop])
        at = stop + 2
    return _Read(items, at)


def _array(data: bytes, at: int, count: int) -> _Read | None:
    items: list[Scalar] = []
    for _ in range(count):
        if (end := data.find(b"\r\n", at)) < 0 or (read := _scalar(data, at, end)) is None:
            return None
        item, at = read
        assert not isinstance(item, list)
        items.append(item)
    return _Read(items, at)


def _scalar(data: bytes, at: int, end: int) -> _Read | None:
    """The one whose first line ends at `end`."""
    kind, line = data[at], data[at + 1 : end]
    if kind == _BULK and (size := int(line)) >= 0:
        stop = end + 2 + size
        return _Read(data[end + 2 : stop], stop + 2) if len(data) >= stop + 2 else None
    if kind in (_BULK, _NULL):
        return _Read(None, end + 2)
    if kind == _INTEGER:
        return _Read(int(line), end + 2)
    if kind == _STATUS:
        return _Read(line, end + 2)
    if kind == _ERROR:
        return _Read(refusal(line), end + 2)
    raise ValueError(f"the server sent a reply of kind {data[at : at + 1]!r}")
