"""Bytes of a RESP3 connection become replies and pushes, however they are cut."""

from __future__ import annotations

import pytest
from redis.exceptions import NoPermissionError, NoScriptError, OutOfMemoryError, ResponseError

from pipeline.broker.resp import Parser, Push

# Wire bytes as the RESP3 specification writes them, and what they say.
WIRE = [
    (b">3\r\n$9\r\nsubscribe\r\n$2\r\nch\r\n:1\r\n", Push([b"subscribe", b"ch", b"1"])),
    (b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$9\r\n0 {\r\n\r\n}x\r\n", Push([b"message", b"ch", b"0 {\r\n\r\n}x"])),
    (b"+PONG\r\n", b"PONG"),
    (b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$0\r\n\r\n", Push([b"message", b"ch", b""])),
    (b">3\r\n$11\r\nunsubscribe\r\n$-1\r\n:0\r\n", Push([b"unsubscribe", b"-1", b"0"])),
    (b":-7\r\n", -7),
    (b"$2\r\n\r\n\r\n", b"\r\n"),
    (b"$-1\r\n", None),
    (b"_\r\n", None),
    (b"*0\r\n", []),
    (b"*4\r\n$2\r\nok\r\n:1\r\n$-1\r\n+fine\r\n", [b"ok", 1, None, b"fine"]),
]
ALL = b"".join(data for data, _ in WIRE)


def test_all_at_once() -> None:
    found = Parser().feed(ALL)
    assert found == [message for _, message in WIRE]
    assert [isinstance(each, Push) for each in found] == [isinstance(message, Push) for _, message in WIRE]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_in_pieces(size: int) -> None:
    parser = Parser()
    pieces = [ALL[at : at + size] for at in range(0, len(ALL), size)]
    assert [message for piece in pieces for message in parser.feed(piece)] == [message for _, message in WIRE]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("NOPERM no access to the channel", NoPermissionError),
        ("NOSCRIPT No matching script", NoScriptError),
        ("OOM command not allowed", OutOfMemoryError),
        ("WRONGTYPE Operation", ResponseError),
    ],
)
def test_a_refusal_is_a_value_and_says_what_the_server_did(line: str, kind: type[Exception]) -> None:
    [error, after] = Parser().feed(f"-{line}\r\n+OK\r\n".encode())
    assert (type(error), str(error), after) == (kind, line, b"OK")


@pytest.mark.parametrize("data", [b">x\r\n", b"*1\r\n$x\r\nab\r\n", b"%1\r\n", b"*1\r\n*1\r\n"])
def test_what_is_no_protocol_is_not_read_on(data: bytes) -> None:
    with pytest.raises(ValueError):
        Parser().feed(data)
