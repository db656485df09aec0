"""Codecs: exact round trips, and refusal of everything whose size is not ours."""

from __future__ import annotations

import lz4.block
import lz4.frame
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import codec
from pipeline.errors import ConfigError, FrameError


def test_the_table_is_what_the_wire_format_says() -> None:
    assert {name: found.id for name, found in codec.CODECS.items()} == {"raw": 0, "lz4": 1}
    assert [codec.numbered(n).name for n in (0, 1)] == ["raw", "lz4"]


@pytest.mark.parametrize("name", ["raw", "lz4"])
@given(data=st.binary(min_size=1, max_size=4096))
def test_round_trip(name: str, data: bytes) -> None:
    found = codec.named(name)
    assert bytes(found.decode(found.encode(memoryview(data)), len(data))) == data


def test_raw_copies_nothing() -> None:
    data = memoryview(bytes(100))
    assert codec.named("raw").encode(data) is data
    assert codec.named("raw").decode(data, 100) is data


def test_lz4_shrinks_a_page_of_zeros_and_is_the_plain_block_format() -> None:
    packed = codec.named("lz4").encode(memoryview(bytes(32768)))
    assert len(packed) < 200
    assert lz4.block.decompress(bytes(packed), uncompressed_size=32768) == bytes(32768)


@pytest.mark.parametrize("name", ["raw", "lz4"])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_another_size_than_ours_is_refused(name: str, wrong: int) -> None:
    data = np.random.default_rng(1).bytes(1000)
    packed = codec.named(name).encode(memoryview(data))
    with pytest.raises(FrameError):
        codec.named(name).decode(packed, len(data) + wrong)


def test_lz4_refuses_a_bomb_before_it_grows() -> None:
    bomb = lz4.block.compress(bytes(1 << 24), store_size=False)
    with pytest.raises(FrameError, match="512"):
        codec.named("lz4").decode(bomb, 512)


@pytest.mark.parametrize("payload", [b"", b"\0" * 10, b"\xff" * 64, lz4.frame.compress(bytes(512))])
def test_lz4_refuses_what_is_not_a_block(payload: bytes) -> None:
    with pytest.raises(FrameError):
        codec.named("lz4").decode(payload, 512)


def test_lz4_refuses_trailing_and_missing_bytes() -> None:
    packed = bytes(codec.named("lz4").encode(memoryview(bytes(range(256)) * 8)))
    for damaged in (packed + b"x", packed[:-1]):
        with pytest.raises(FrameError):
            codec.named("lz4").decode(damaged, 2048)


def test_unknown_codecs() -> None:
    with pytest.raises(FrameError, match="unknown codec id 77"):
        codec.numbered(77)
    with pytest.raises(ConfigError, match="choose one of lz4, raw"):
        codec.named("zstd")
