"""Codec: how a frame's payload is packed. `raw` is the dumb twin: no copy, no size change.

Rule: a codec never trusts a size that arrived with the data. `decode` is told the size from our own contract and
refuses anything else, so a payload that claims a terabyte allocates one page at most.
To add one: a class with a fresh id, a row in `CODECS`, golden bytes in `tests/golden`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import lz4.block
import numpy as np
import zstandard
from numpy.typing import NDArray

from pipeline.errors import CodecRefusedError, ConfigError, FrameError
from pipeline.page import PAGE_TOKENS

Buffer: TypeAlias = bytes | memoryview
AUTO = "auto"
_FAST = 400e6  # bytes per second: no packing of ours keeps up with such a link
_WORTH = 1.08
_LEEWAY = 0.7


class Codec(Protocol):
    """`id` travels in every frame header (0..255); `name` is what an operator writes. `lossy`: a page comes out
    changed; both sides must have asked for it."""

    @property
    def lossy(self) -> bool: ...

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str: ...

    def encode(self, data: memoryview, head_dim: int) -> Buffer:
        """Pack the bytes of a page whose rows have `head_dim` values. The result may alias `data`."""
        ...

    def decode(self, payload: Buffer, expected_bytes: int, head_dim: int) -> Buffer:
        """Unpack to exactly `expected_bytes`; may alias `payload`. Raises FrameError."""
        ...


class Raw:
    """The bytes as they are."""

    id = 0
    name = "raw"
    lossy = False

    def encode(self, data: memoryview, head_dim: int) -> Buffer:
        return data

    def decode(self, payload: Buffer, expected_bytes: int, head_dim: int) -> Buffer:
        if len(payload) != expected_bytes:
            raise FrameError(f"a raw payload of {len(payload)} bytes where {expected_bytes} belong")
        return payload


class Lz4:
    """LZ4 block format without a stored size: the frame format's content size can be forged.

    Random FP16 keys and values do not shrink; zero padding and repeated pages do.
    """

    id = 1
    name = "lz4"
    lossy = False

    def encode(self, data: memoryview, head_dim: int) -> Buffer:
        packed: bytes = lz4.block.compress(data, store_size=False)
        return packed

    def decode(self, payload: Buffer, expected_bytes: int, head_dim: int) -> Buffer:
        try:
            data: bytes = lz4.block.decompress(payload, uncompressed_size=expected_bytes)
        except lz4.block.LZ4BlockError as error:
            raise FrameError(f"an lz4 payload does not unpack to {expected_bytes} bytes: {error}") from None
        if len(data) != expected_bytes:
            raise FrameError(f"an lz4 payload unpacks to {len(data)} bytes where {expected_bytes} belong")
        return data


class Zstd:
    """All low bytes of the FP16 values, then all high ones, as one Zstandard frame of level 1 that states its size.

    The high bytes (sign, exponent, two bits of mantissa) repeat; mixed with the low ones they would not be found.
    """

    id = 2
    name = "zstd"
    lossy = False

    def encode(self, data: memoryview, head_dim: int) -> Buffer:
        halves = np.frombuffer(data, np.uint8).reshape(-1, 2)
        packed: bytes = zstandard.ZstdCompressor(level=1).compress(_bytes(halves.T))
        return packed

    def decode(self, payload: Buffer, expected_bytes: int, head_dim: int) -> Buffer:
        try:
            stated = zstandard.get_frame_parameters(payload).content_size
            if stated != expected_bytes:  # it would be allocated as stated
                raise FrameError(f"a zstd payload states {stated} bytes where {expected_bytes} belong")
            data = zstandard.ZstdDecompressor().decompress(payload, expected_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise FrameError(f"a zstd payload does not unpack to {expected_bytes} bytes: {error}") from None
        low, high = np.frombuffer(data, np.uint8).reshape(2, -1)
        values = high.astype("<u2")  # whole values at a time: byte by byte it takes four times as long
        values <<= 8
        values |= low
        return _bytes(values)


class Int8:
    """Lossy: eight bits a value, one FP32 scale per channel (layer, K or V, head, dimension) over a page's 64 tokens.

    First all scales `max|x| / 127`, then all values `round(x / scale)` in the order of the page. One multiplication
    and one rounding bring a value back, so every machine gets the same FP16 bits.
    """

    id = 3
    name = "int8"
    lossy = True

    def encode(self, data: memoryview, head_dim: int) -> Buffer:
        page = np.frombuffer(data, "<f2").reshape(-1, PAGE_TOKENS, head_dim).astype(np.float32)
        scales = np.abs(page).max(axis=1, keepdims=True) / np.float32(127)
        values = np.rint(page / np.where(scales > 0, scales, np.float32(1))).astype(np.int8)
        packed: bytes = scales.astype("<f4").tobytes() + values.tobytes()
        return packed

    def decode(self, payload: Buffer, expected_bytes: int, head_dim: int) -> Buffer:
        values = expected_bytes // 2
        channels = values // PAGE_TOKENS
        if len(payload) != 4 * channels + values:
            raise FrameError(f"an int8 payload of {len(payload)} bytes where {4 * channels + values} belong")
        scales = np.frombuffer(payload, "<f4", channels).reshape(-1, 1, head_dim)
        quanta = np.frombuffer(payload, np.int8, values, 4 * channels).reshape(-1, PAGE_TOKENS, head_dim)
        with np.errstate(over="ignore", invalid="ignore"):  # scales of a liar: the page is then not finite, or another
            return _bytes((quanta * scales).astype("<f2"))


def _bytes(array: NDArray[Any]) -> memoryview:
    """The array's values in C order, copied where they lie otherwise."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw(), Lz4(), Zstd(), Int8())}
_BY_ID: dict[int, Codec] = {codec.id: codec for codec in CODECS.values()}


def named(name: str) -> Codec:
    """The codec an operator asked for. Raises ConfigError."""
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}: choose one of {', '.join(sorted([*CODECS, AUTO]))}")
    return CODECS[name]


def numbered(codec_id: int) -> Codec:
    """The codec a frame header names. Raises FrameError."""
    if codec_id not in _BY_ID:
        raise FrameError(f"unknown codec id {codec_id}: the sender runs a newer version")
    return _BY_ID[codec_id]


def understood(ours: str) -> tuple[str, ...]:
    """Names of the codecs that a reader set to `ours` takes: every lossless one, and its own."""
    return tuple(name for name, codec in CODECS.items() if not codec.lossy or name == ours)


class Choice:
    """Which codec the next page gets. `auto`: `raw`, unless a page shows that `zstd` makes the transfer quicker.

    Packing runs beside sending, so a packed transfer goes as fast as the slower of the two: it is chosen where
    min(0.7 * packing rate, ratio * link rate) >= 1.08 * link rate, all three measured on this very transfer.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._auto = name == AUTO
        self._fixed = named("raw" if self._auto else name)
        self._clock = clock
        self._link_rate: float | None = None  # bytes per second
        self._sample: tuple[float, float] | None = None  # ratio and packing rate of one page

    def observe(self, sent_bytes: int, seconds: float) -> None:
        """So many bytes were on the server after so long. The fastest seen counts: load on us is not the link's."""
        self._link_rate = max(self._link_rate or 0.0, sent_bytes / max(seconds, 1e-9))

    def codec(self, data: memoryview, head_dim: int) -> Codec:
        """For the page `data`. The first page whose link is known and not fast is packed once to see what it gives."""
        if not self._auto or self._link_rate is None or self._link_rate > _FAST:
            return self._fixed
        candidate = CODECS["zstd"]
        if self._sample is None:
            begin = self._clock()
            packed = candidate.encode(data, head_dim)
            self._sample = len(data) / len(packed), len(data) / max(self._clock() - begin, 1e-9)
        ratio, packing_rate = self._sample
        packed_rate = min(_LEEWAY * packing_rate, ratio * self._link_rate)
        return candidate if packed_rate >= _WORTH * self._link_rate else self._fixed


def spoken(ours: str, theirs: Iterable[str]) -> str:
    """The codec to write with, for a peer that takes `theirs`. Raises CodecRefusedError when it does not take ours."""
    theirs = tuple(theirs)
    if ours == AUTO:
        return AUTO if "zstd" in theirs else "raw"
    if ours not in theirs:
        raise CodecRefusedError(ours, theirs)
    return ours
