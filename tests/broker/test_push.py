"""Bytes of a subscribed connection become messages, however they are cut."""

from __future__ import annotations

import pytest

from pipeline.broker.push import PushParser
from pipeline.errors import BrokerError

# Wire bytes as the RESP2 and RESP3 specifications write them, and what they say.
WIRE = [
    (b">3\r\n$9\r\nsubscribe\r\n$2\r\nch\r\n:1\r\n", [b"subscribe", b"ch", b"1"]),
    (b"*3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$9\r\n0 {\r\n\r\n}x\r\n", [b"message", b"ch", b"0 {\r\n\r\n}x"]),
    (b"+PONG\r\n", [b"PONG"]),
    (b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$0\r\n\r\n", [b"message", b"ch", b""]),
    (b"*3\r\n$11\r\nunsubscribe\r\n$-1\r\n:0\r\n", [b"unsubscribe", b"-1", b"0"]),
    (b"*2\r\n$4\r\npong\r\n$3\r\nhub\r\n", [b"pong", b"hub"]),
]
ALL = b"".join(data for data, _ in WIRE)


def test_all_at_once() -> None:
    assert PushParser().feed(ALL) == [message for _, message in WIRE]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_in_pieces(size: int) -> None:
    parser = PushParser()
    pieces = [ALL[at : at + size] for at in range(0, len(ALL), size)]
    assert [message for piece in pieces for message in parser.feed(piece)] == [message for _, message in WIRE]


def test_an_error_reply_says_what_the_broker_did() -> None:
    with pytest.raises(BrokerError, match="NOPERM no access to the channel"):
        PushParser().feed(b"-NOPERM no access to the channel\r\n")


@pytest.mark.parametrize("data", [b">x\r\n", b"*1\r\n$x\r\nab\r\n"])
def test_what_is_no_protocol_is_not_read_on(data: bytes) -> None:
    with pytest.raises(ValueError):
        PushParser().feed(data)
