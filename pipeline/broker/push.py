"""Push: the messages of a subscribed connection, read from its bytes. Knows no socket.

The subset of RESP2 and RESP3 that such a connection speaks: arrays and pushes of flat items, and one-line replies.
redis-py's own reader takes about 100 us of CPU a message, this one 3; every token of an answer is a message.
"""

from __future__ import annotations

from pipeline.errors import BrokerError

_BULK, _PUSH, _ARRAY, _ERROR = b"$>*-"
Items = list[bytes]


class PushParser:
    """`feed` what has come, get every message that is whole: its items, `[b"message", channel, data]` for example.

    A one-line reply (`+PONG`) is a message of one item. Raises BrokerError for an error reply, ValueError for bytes
    that are no protocol of ours.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Items]:
        data, at, found = self._rest + data, 0, []
        while (read := _message(data, at)) is not None:
            items, at = read
            found.append(items)
        self._rest = data[at:]
        return found


def _message(data: bytes, at: int) -> tuple[Items, int] | None:
    """The message that starts at `at`, and where the next one does; None while it is not whole."""
    if (end := data.find(b"\r\n", at)) < 0:
        return None
    if data[at] == _ERROR:
        raise BrokerError(f"the broker refused a subscription: {data[at + 1 : end].decode(errors='replace')}")
    if data[at] not in (_PUSH, _ARRAY):
        return [data[at + 1 : end]], end + 2
    return _items(data, end + 2, int(data[at + 1 : end]))


def _items(data: bytes, at: int, count: int) -> tuple[Items, int] | None:
    items: Items = []
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
    return items, at
