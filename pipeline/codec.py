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
_TRIAL = 4  # times packed pages arrived before that is held against the raw ones
_KEPT = 0.75


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
_PACKER: Codec = CODECS["zstd"]  # of `auto`
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
    """Packs pages. `auto`: `raw`, unless pages show that `zstd` makes the transfer quicker.

    Packing, sending and unpacking run beside each other, so a packed transfer goes as fast as the slowest of them: it
    is chosen where min(0.7 * packing rate, 0.7 * unpacking rate, ratio * link rate) >= 1.08 * link rate. All of it is
    measured on this very transfer, packing on every page, since cores that were idle at first may be busy now.
    Unpacking is measured here, on the first page; the peer's cores may be busier, and that is felt: a reader that lags
    gives credit back late. So what arrives is measured too, and once packed pages arrive more slowly than the raw ones
    before them, the rest of the transfer is raw.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._auto = name == AUTO
        self._fixed = named("raw" if self._auto else name)
        self._clock = clock
        self._link_rate: float | None = None  # bytes per second
        self._packing: _Rate | None = None  # of pages; none was packed so far
        self._unpacking_rate = 0.0
        self._ratio = 1.0
        self._raw_arrival, self._packed_arrival = _Rate(), _Rate()
        self._given_up = False

    def observe(self, page_bytes: int, sent_bytes: int, seconds: float) -> None:
        """Pages of `page_bytes` were on the server, as `sent_bytes`, so long after they could have gone; waiting for
        credit counts. The fastest seen is the link's rate: load on us is not the link's."""
        self._link_rate = max(self._link_rate or 0.0, sent_bytes / max(seconds, 1e-9))
        (self._packed_arrival if sent_bytes < page_bytes else self._raw_arrival).add(page_bytes, seconds)

    def pack(self, data: memoryview, head_dim: int) -> tuple[Codec, Buffer]:
        """The codec that the page `data` got, and its payload. One that did not shrink goes out raw: the credit
        reserved for the raw size always suffices."""
        if not self._auto:
            return _shrunk(self._fixed, self._fixed.encode(data, head_dim), data)
        if self._link_rate is None or self._link_rate > _FAST:
            return self._fixed, data
        first = self._measured(data, head_dim) if self._packing is None else None
        if not self._worth():
            return self._fixed, data
        return _shrunk(_PACKER, first or self._timed(data, head_dim), data)

    def _measured(self, data: memoryview, head_dim: int) -> Buffer:
        """Pack a page, and unpack it, for what that gives and takes."""
        payload = self._timed(data, head_dim)
        begin = self._clock()
        _PACKER.decode(payload, len(data), head_dim)
        self._unpacking_rate = len(data) / max(self._clock() - begin, 1e-9)
        self._ratio = len(data) / len(payload)
        return payload

    def _timed(self, data: memoryview, head_dim: int) -> Buffer:
        begin = self._clock()
        payload = _PACKER.encode(data, head_dim)
        self._packing = self._packing or _Rate()
        self._packing.add(len(data), self._clock() - begin)
        return payload

    def _worth(self) -> bool:
        assert self._packing is not None
        assert self._link_rate is not None
        if self._packed_arrival.times >= _TRIAL:
            lag = self._raw_arrival.bytes_per_s / self._packed_arrival.bytes_per_s
            self._given_up |= lag > _WORTH  # by less two rates differ anyway
        if self._given_up:
            return False
        working = _LEEWAY * min(self._packing.bytes_per_s, self._unpacking_rate)
        return min(working, self._ratio * self._link_rate) >= _WORTH * self._link_rate


class _Rate:
    """Bytes per second, of late: what is four measurements old counts a third."""

    def __init__(self) -> None:
        self.times = 0
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, count: int, seconds: float) -> None:
        self.times += 1
        self._bytes = _KEPT * self._bytes + count
        self._seconds = _KEPT * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / max(self._seconds, 1e-9)


def _shrunk(codec: Codec, payload: Buffer, data: memoryview) -> tuple[Codec, Buffer]:
    return (codec, payload) if len(payload) < len(data) else (CODECS["raw"], data)


def spoken(ours: str, theirs: Iterable[str]) -> str:
    """The codec to write with, for a peer that takes `theirs`. Raises CodecRefusedError when it does not take ours."""
    theirs = tuple(theirs)
    if ours == AUTO:
        return AUTO if "zstd" in theirs else "raw"
    if ours not in theirs:
        raise CodecRefusedError(ours, theirs)
    return ours
