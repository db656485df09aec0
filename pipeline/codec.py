"""Codec: how a frame's payload is packed. `raw` is the dumb twin: no copy, no size change.

Rule: a codec never trusts a size that arrived with the data. `decode` is told the size from our own contract and
refuses anything else, so a payload that claims a terabyte allocates one page at most.
To add one: a class with a fresh id, a row in `CODECS`, golden bytes in `tests/golden`.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import lz4.block

from pipeline.errors import ConfigError, FrameError

Buffer: TypeAlias = bytes | memoryview


class Codec(Protocol):
    """`id` travels in every frame header (0..255); `name` is what an operator writes."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str: ...

    def encode(self, data: memoryview) -> Buffer:
        """Pack one-dimensional bytes. The result may alias `data`."""
        ...

    def decode(self, payload: Buffer, expected_bytes: int) -> Buffer:
        """Unpack to exactly `expected_bytes`; may alias `payload`. Raises FrameError."""
        ...


class Raw:
    """The bytes as they are."""

    id = 0
    name = "raw"

    def encode(self, data: memoryview) -> Buffer:
        return data

    def decode(self, payload: Buffer, expected_bytes: int) -> Buffer:
        if len(payload) != expected_bytes:
            raise FrameError(f"a raw payload of {len(payload)} bytes where {expected_bytes} belong")
        return payload


class Lz4:
    """LZ4 block format without a stored size: the frame format's content size can be forged.

    Random FP16 keys and values do not shrink; zero padding and repeated pages do.
    """

    id = 1
    name = "lz4"

    def encode(self, data: memoryview) -> Buffer:
        packed: bytes = lz4.block.compress(data, store_size=False)
        return packed

    def decode(self, payload: Buffer, expected_bytes: int) -> Buffer:
        try:
            data: bytes = lz4.block.decompress(payload, uncompressed_size=expected_bytes)
        except lz4.block.LZ4BlockError as error:
            raise FrameError(f"an lz4 payload does not unpack to {expected_bytes} bytes: {error}") from None
        if len(data) != expected_bytes:
            raise FrameError(f"an lz4 payload unpacks to {len(data)} bytes where {expected_bytes} belong")
        return data


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw(), Lz4())}
_BY_ID: dict[int, Codec] = {codec.id: codec for codec in CODECS.values()}


def named(name: str) -> Codec:
    """The codec an operator asked for. Raises ConfigError."""
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}: choose one of {', '.join(sorted(CODECS))}")
    return CODECS[name]


def numbered(codec_id: int) -> Codec:
    """The codec a frame header names. Raises FrameError."""
    if codec_id not in _BY_ID:
        raise FrameError(f"unknown codec id {codec_id}: the sender runs a newer version")
    return _BY_ID[codec_id]
