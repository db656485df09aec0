"""Header: the fixed binary head of every frame, its bounded body and its own digest.

Little-endian, one layout for all kinds; fields a kind does not use are zero. This module parses and prints; which
header may come when is `frame`'s to say.
"""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from typing import NamedTuple

import xxhash

from pipeline.contract import WIRE_VERSION
from pipeline.errors import FrameError
from pipeline.handoff import Attempts

MAGIC = b"CFKV"
MAX_BODY_BYTES = 2048  # COMMIT: token ids; ABORT: code and message
MAX_ATTEMPT = 0xFFFF

# magic, version, kind, codec, flags, handoff id, P attempt, D attempt, sequence, page index (COMMIT: page count),
# tokens, reserved, raw bytes, payload bytes, body bytes, chain key, digest
_FIXED = struct.Struct("<4sHBBI16sHHIIHHIII32s16s")
_DIGEST = struct.Struct("<Q")
MIN_HEADER_BYTES = _FIXED.size + _DIGEST.size
MAX_HEADER_BYTES = MIN_HEADER_BYTES + MAX_BODY_BYTES
_HANDOFF_ID = re.compile(r"[0-9a-f]{32}")
_NO_DIGEST = bytes(16)


class Kind(IntEnum):
    OPEN = 1
    PAGE = 2
    COMMIT = 3
    ABORT = 4


_KINDS = frozenset(Kind)


class Header(NamedTuple):
    """One parsed header. `index` is the page's index in the prompt, for COMMIT the number of pages sent."""

    kind: Kind
    codec_id: int
    handoff_id: str
    attempts: Attempts
    sequence: int
    index: int = 0  # type: ignore[assignment]  # hides the method of tuples, which nobody needs here
    tokens: int = 0
    raw_bytes: int = 0
    payload_bytes: int = 0
    key: bytes = bytes(32)
    digest: bytes = _NO_DIGEST
    body: bytes = b""


def is_handoff_id(text: str) -> bool:
    """Whether this is the hex of a UUID: ids become key names and 16 header bytes."""
    return _HANDOFF_ID.fullmatch(text) is not None


def require_handoff_id(handoff_id: str) -> None:
    """Raise FrameError unless `is_handoff_id`."""
    if not is_handoff_id(handoff_id):
        raise FrameError("a handoff id is the 32 lower-case hex digits of a UUID")


def require_identity(handoff_id: str, attempts: Attempts) -> None:
    """Raise FrameError for an id or attempts (1..65535) that no frame can carry."""
    require_handoff_id(handoff_id)
    for attempt in (attempts.prefill, attempts.decode):
        require(1 <= attempt <= MAX_ATTEMPT, "attempt", f"1..{MAX_ATTEMPT}", attempt)


def encode(header: Header) -> bytes:
    """The header's bytes: fixed part, body, xxh3_64 over both."""
    fixed = _FIXED.pack(
        MAGIC,
        WIRE_VERSION,
        header.kind,
        header.codec_id,
        0,
        bytes.fromhex(header.handoff_id),
        header.attempts.prefill,
        header.attempts.decode,
        header.sequence,
        header.index,
        header.tokens,
        0,
        header.raw_bytes,
        header.payload_bytes,
        len(header.body),
        header.key,
        header.digest,
    )
    return fixed + header.body + _DIGEST.pack(xxhash.xxh3_64_intdigest(fixed + header.body))


def decode(data: bytes) -> Header:
    """Parse one header, whatever transfer it belongs to. Raises FrameError."""
    require(MIN_HEADER_BYTES <= len(data) <= MAX_HEADER_BYTES, "size of header", f"{MIN_HEADER_BYTES}..", len(data))
    magic, version, kind, codec_id, flags, handoff, prefill, decode_, *rest = _FIXED.unpack_from(data)
    sequence, index, tokens, reserved, raw_bytes, payload_bytes, body_bytes, key, digest = rest
    require(magic == MAGIC, "magic", MAGIC, magic)
    require(version == WIRE_VERSION, "wire version", WIRE_VERSION, version)
    room = len(data) - MIN_HEADER_BYTES
    require(body_bytes == room, "size of body", room, body_bytes)
    (seal,) = _DIGEST.unpack_from(data, len(data) - _DIGEST.size)
    require(seal == xxhash.xxh3_64_intdigest(data[: -_DIGEST.size]), "digest of header", "its bytes", "another")
    require(kind in _KINDS, "kind", "1..4", kind)
    require(flags == 0 and reserved == 0, "flags", 0, flags or reserved)
    body = data[_FIXED.size : -_DIGEST.size]
    place = (Kind(kind), codec_id, handoff.hex(), Attempts(prefill, decode_), sequence)
    return Header(*place, index, tokens, raw_bytes, payload_bytes, key, digest, body)


def require(right: bool, what: str, expected: object, got: object) -> None:
    """Raise FrameError naming what is wrong unless `right`."""
    if not right:
        raise wrong(what, expected, got)


def wrong(what: str, expected: object, got: object) -> FrameError:
    """For checks of every page, where it would cost to have the words ready."""
    return FrameError(f"wrong {what}: expected {expected}, got {got}")
