"""Codecs: exact round trips, and refusal of everything whose size is not ours."""

from __future__ import annotations

from typing import get_args

import lz4.block
import lz4.frame
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline import codec, settings
from pipeline.codec import Choice
from pipeline.errors import CodecRefusedError, ConfigError, FrameError


def test_the_table_is_what_the_wire_format_says() -> None:
    assert {name: found.id for name, found in codec.CODECS.items()} == {"raw": 0, "lz4": 1, "zstd": 2, "int8": 3}
    assert [codec.numbered(n).name for n in range(4)] == ["raw", "lz4", "zstd", "int8"]
    assert [name for name, found in codec.CODECS.items() if found.lossy] == ["int8"]
    assert {*codec.CODECS, codec.AUTO} == set(get_args(settings.Codec))


@pytest.mark.parametrize("name", ["raw", "lz4", "zstd"])
@given(data=st.binary(min_size=1, max_size=4096).map(lambda data: data * 2))
def test_round_trip(name: str, data: bytes) -> None:
    found = codec.named(name)
    assert bytes(found.decode(found.encode(memoryview(data), 8), len(data), 8)) == data


def test_raw_copies_nothing() -> None:
    data = memoryview(bytes(100))
    assert codec.named("raw").encode(data, 8) is data
    assert codec.named("raw").decode(data, 100, 8) is data


def test_lz4_shrinks_a_page_of_zeros_and_is_the_plain_block_format() -> None:
    packed = codec.named("lz4").encode(memoryview(bytes(32768)), 8)
    assert len(packed) < 200
    assert lz4.block.decompress(bytes(packed), uncompressed_size=32768) == bytes(32768)


@pytest.mark.parametrize("name", ["raw", "lz4", "zstd", "int8"])
@pytest.mark.parametrize("wrong", [-1024, 1024])
def test_another_size_than_ours_is_refused(name: str, wrong: int) -> None:
    data = np.random.default_rng(1).standard_normal(4 * 64 * 8).astype("<f2").tobytes()
    packed = codec.named(name).encode(memoryview(data), 8)
    with pytest.raises(FrameError):
        codec.named(name).decode(packed, len(data) + wrong, 8)


def test_lz4_refuses_a_bomb_before_it_grows() -> None:
    bomb = lz4.block.compress(bytes(1 << 24), store_size=False)
    with pytest.raises(FrameError, match="512"):
        codec.named("lz4").decode(bomb, 512, 8)


@pytest.mark.parametrize("payload", [b"", b"\0" * 10, b"\xff" * 64, lz4.frame.compress(bytes(512))])
def test_lz4_refuses_what_is_not_a_block(payload: bytes) -> None:
    with pytest.raises(FrameError):
        codec.named("lz4").decode(payload, 512, 8)


def test_lz4_refuses_trailing_and_missing_bytes() -> None:
    packed = bytes(codec.named("lz4").encode(memoryview(bytes(range(256)) * 8), 8))
    for damaged in (packed + b"x", packed[:-1]):
        with pytest.raises(FrameError):
            codec.named("lz4").decode(damaged, 2048, 8)


def test_unknown_codecs() -> None:
    with pytest.raises(FrameError, match="unknown codec id 77"):
        codec.numbered(77)
    with pytest.raises(ConfigError, match="choose one of auto, int8, lz4, raw, zstd"):
        codec.named("gzip")


# -- zstd


def test_zstd_is_one_standard_frame_of_low_then_high_bytes() -> None:
    values = np.arange(512, dtype="<u2") + 0x3C00
    packed = codec.named("zstd").encode(memoryview(values.tobytes()), 8)
    expected = (values & 0xFF).astype(np.uint8).tobytes() + (values >> 8).astype(np.uint8).tobytes()
    assert zstandard.ZstdDecompressor().decompress(bytes(packed)) == expected
    assert len(packed) < 0.6 * 1024


def test_zstd_refuses_a_bomb_before_it_grows() -> None:
    for bomb in (zstandard.compress(bytes(1 << 24)), zstandard.ZstdCompressor().compressobj().compress(bytes(99))):
        with pytest.raises(FrameError):
            codec.named("zstd").decode(bomb, 512, 8)


@pytest.mark.parametrize("payload", [b"", b"\0" * 10, b"\xff" * 64])
def test_zstd_refuses_what_is_not_a_frame(payload: bytes) -> None:
    with pytest.raises(FrameError):
        codec.named("zstd").decode(payload, 512, 8)


def test_zstd_refuses_trailing_and_missing_bytes() -> None:
    packed = bytes(codec.named("zstd").encode(memoryview(bytes(range(256)) * 8), 8))
    for damaged in (packed + b"x", packed[:-1], packed + packed):
        with pytest.raises(FrameError):
            codec.named("zstd").decode(damaged, 2048, 8)


# -- int8


def test_int8_against_plain_arithmetic() -> None:
    """Two channels over 64 tokens, one of them all zero."""
    values = np.zeros((64, 2), "<f2")
    values[:, 0] = np.linspace(-3, 5, 64)
    packed = bytes(codec.named("int8").encode(memoryview(values.tobytes()), 2))
    scale = np.float32(5) / np.float32(127)
    assert np.frombuffer(packed[:8], "<f4").tolist() == [scale, 0]
    quanta = [round(float(np.float32(value) / scale)) for value in values[:, 0]]
    assert np.frombuffer(packed[8:], np.int8).reshape(64, 2).tolist() == [[q, 0] for q in quanta]
    back = np.frombuffer(codec.named("int8").decode(packed, 256, 2), "<f2").reshape(64, 2)
    assert back[:, 0].tolist() == [float(np.float16(np.float32(q) * scale)) for q in quanta]
    assert not back[:, 1].any()


def test_int8_keeps_the_largest_finite_value() -> None:
    values = np.full((64, 1), 65504, "<f2")
    values[0] = -65504
    packed = codec.named("int8").encode(memoryview(values.tobytes()), 1)
    assert np.frombuffer(codec.named("int8").decode(packed, 128, 1), "<f2").tolist() == [-65504] + [65504] * 63


def test_int8_of_a_liars_scales_is_at_worst_not_finite() -> None:
    payload = np.array([np.inf, np.nan], "<f4").tobytes() + b"\x01" * 128
    assert not np.isfinite(np.frombuffer(codec.named("int8").decode(payload, 256, 2), "<f2")).any()


# -- who speaks what


def test_a_lossy_codec_is_taken_only_by_who_is_set_to_it() -> None:
    assert codec.understood("raw") == codec.understood("auto") == codec.understood("zstd") == ("raw", "lz4", "zstd")
    assert codec.understood("int8") == ("raw", "lz4", "zstd", "int8")


def test_what_is_spoken_to_a_peer() -> None:
    assert codec.spoken("zstd", ("raw", "zstd")) == "zstd"
    assert codec.spoken("auto", ("raw", "lz4", "zstd")) == "auto"
    assert codec.spoken("auto", ("raw", "lz4")) == "raw"
    with pytest.raises(
        CodecRefusedError, match=r"sends pages as int8, .* takes only raw, lz4, zstd: give both the same"
    ):
        codec.spoken("int8", codec.understood("raw"))


# -- auto


class Ticks:
    """A clock that moves on by `step_s` at each look."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


SMOOTH = memoryview(np.linspace(0, 1, 1 << 14).astype("<f2").tobytes())
NOISE = memoryview(np.random.default_rng(0).bytes(1 << 15))


def _sent(choice: Choice, rate: float, *, packed: bool = False, times: int = 1) -> None:
    """A million bytes of pages arrive, `rate` of them a second; packed ones as half of that."""
    for _ in range(times):
        choice.observe(10**6, 10**6 // (1 + packed), 10**6 / rate)


def _name(choice: Choice, data: memoryview) -> str:
    """What the page `data` gets; it comes back as it was."""
    used, payload = choice.pack(data, 8)
    assert used.decode(payload, len(data), 8) == data
    return used.name


@pytest.mark.parametrize(
    ("data", "link_rate", "packing_rate", "expected"),
    [
        (SMOOTH, None, 1e9, "raw"),  # nothing was sent so far
        (SMOOTH, 85e6, 1e9, "zstd"),
        (SMOOTH, 300e6, 1e9, "zstd"),
        (SMOOTH, 85e6, 100e6, "raw"),  # packing would be the bottleneck
        (SMOOTH, 401e6, 1e12, "raw"),  # a fast link, whatever packing could do
        (NOISE, 1e6, 1e9, "raw"),  # nothing to gain
    ],
)
def test_auto_packs_only_where_that_is_quicker(
    data: memoryview, link_rate: float | None, packing_rate: float, expected: str
) -> None:
    choice = Choice("auto", Ticks(len(data) / packing_rate))
    assert _name(choice, data) == "raw"
    if link_rate is not None:
        _sent(choice, link_rate)
    assert _name(choice, data) == expected


def test_auto_goes_back_to_raw_when_the_link_turns_out_fast() -> None:
    choice = Choice("auto", Ticks(len(SMOOTH) / 1e9))
    _sent(choice, 100e6)
    assert _name(choice, SMOOTH) == "zstd"
    _sent(choice, 1e9)
    _sent(choice, 100e6)
    assert _name(choice, SMOOTH) == "raw"


def test_auto_goes_back_to_raw_when_the_cores_of_the_sender_become_busy() -> None:
    clock = Ticks(len(SMOOTH) / 1e9)
    choice = Choice("auto", clock)
    _sent(choice, 85e6)
    assert _name(choice, SMOOTH) == "zstd"
    clock.step_s *= 20
    assert [_name(choice, SMOOTH) for _ in range(3)] == ["zstd", "raw", "raw"]  # the first shows it


def test_auto_does_not_pack_what_takes_long_to_unpack() -> None:
    packing_s, unpacking_s = len(SMOOTH) / 1e9, len(SMOOTH) / 50e6
    looks = iter((0.0, packing_s, 1.0, 1.0 + unpacking_s))
    choice = Choice("auto", lambda: next(looks))
    _sent(choice, 85e6)
    assert _name(choice, SMOOTH) == "raw"


def test_auto_goes_back_to_raw_when_packed_pages_arrive_later_than_raw_ones() -> None:
    """A decoder without a core to spare: it unpacks slowly, so the sender waits for credit."""
    choice = Choice("auto", Ticks(len(SMOOTH) / 1e9))
    _sent(choice, 85e6)
    assert _name(choice, SMOOTH) == "zstd"
    _sent(choice, 60e6, packed=True, times=3)
    assert _name(choice, SMOOTH) == "zstd"  # three may be chance
    _sent(choice, 60e6, packed=True)
    assert _name(choice, SMOOTH) == "raw"
    _sent(choice, 50e6, times=20)  # a link that slows down is no second chance
    assert _name(choice, SMOOTH) == "raw"


def test_auto_goes_on_packing_while_more_arrives() -> None:
    choice = Choice("auto", Ticks(len(SMOOTH) / 1e9))
    _sent(choice, 85e6)
    for _ in range(20):
        assert _name(choice, SMOOTH) == "zstd"
        _sent(choice, 100e6, packed=True)


def test_a_fixed_codec_stays_whatever_is_measured() -> None:
    choice = Choice("zstd")
    choice.observe(1, 1, 1e-9)
    assert _name(choice, SMOOTH) == "zstd"


def test_what_does_not_shrink_goes_out_raw() -> None:
    assert _name(Choice("lz4"), NOISE) == "raw"
