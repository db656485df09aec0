"""Message: what worker and plug-in say to each other, one packet each over a local SOCK_SEQPACKET socket.

Control only: pages go through the ring. The worker owns the ring's runs and asks for every copy, so a free run is the
backpressure, nobody's pages wait in a run, and each handoff has at most the copies its job asked for. `room` names a
request (never 0), `page` is the index of a page in its prompt.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

ADDRESS = "CROSSFILL_SGLANG_ADDRESS"  # environment variable: where the plug-in finds its worker; unset, it does nothing

_LAYOUT = struct.Struct("<BBxxIQq")
SIZE = _LAYOUT.size
MAX_SIZE = SIZE + 4096  # eight first tokens with twenty alternatives each take 1344 bytes


class Kind(IntEnum):
    # The worker's
    READ = 1  # `value` pages from `page` on, out of the KV pool into `run`
    WRITE = 5  # D: likewise, from `run` into the pool
    RELEASE = 2  # P: every wanted page was copied, the blocks may go
    COMMIT = 3  # D: every page is there, `value` is P's first token
    MEASURE = 4
    # The plug-in's
    HELLO = 16  # its pool has the worker's page shape
    READY = 17  # P: pages [0, page) are computed
    FIRST = 18  # P: the prompt is computed, `value` is the token that SGLang drew behind it, `data` an `order.First`
    ADMITTED = 19  # D: there is room; the leading `page` pages are held and pinned
    COPIED = 20
    REFUSED = 21  # READ, WRITE: the request has ended or was aborted, nothing was copied
    GAUGES = 22  # `page` pages are free or could be evicted, `value` of these are cached
    LOGPROB = 23  # D: of the next token, `value`; before SGLang hands that out. `data` is packed by `pipeline.logprob`
    FAILED = 24  # `data` says why the request cannot go on, in UTF-8


class Message(NamedTuple):
    kind: Kind
    room: int = 0
    page: int = 0
    value: int = 0
    run: int = 0
    data: bytes = b""  # what is behind the fixed part; few kinds have any


def encode(message: Message) -> bytes:
    return _LAYOUT.pack(message.kind, message.run, message.page, message.room, message.value) + message.data


def decode(packet: bytes) -> Message:
    """Raises ValueError or struct.error when `packet` is not a message."""
    kind, run, page, room, value = _LAYOUT.unpack_from(packet)
    return Message(Kind(kind), room, page, value, run, packet[SIZE:])
