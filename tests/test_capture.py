"""The `.handoff` file: round trips, and that nothing damaged, cut, forged or newer gets a page through unverified."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import capture as captures
from pipeline.capture import Capture, Reader
from pipeline.contract import Contract
from pipeline.errors import CaptureError, EngineError
from pipeline.frame import page_digest
from pipeline.page import Page, page_count, page_tokens
from pipeline.request import Request, Sampling

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=1, head_dim=4, vocab_size=1024, context_length=4096)
ID = "0123456789abcdef0123456789abcdef"
FIXED = struct.Struct("<8sHHI")


def capture(count: int = 200, **fields: object) -> Capture:
    ids = tuple(int(i) for i in np.random.default_rng(count).integers(0, CONTRACT.vocab_size, count))
    request = Request(ID, ids, Sampling(max_tokens=3, temperature=0.0, stop_token_ids=(7, 9)), salt="s")
    made = Capture(request, CONTRACT, "fake", ((5, 6, 7),), ("stop",), count, page_count(count - 1))
    return replace(made, trace={"state": "finished", "marks_ms": {"committed": 1.5}}, **fields)  # type: ignore[arg-type]


def pages(one: Capture) -> list[Page]:
    noise = np.random.default_rng(1)
    found = []
    for index in range(one.pages):
        data, count = CONTRACT.page_shape.empty(), page_tokens(index, one.request.transfer_tokens)
        data[..., :count, :] = noise.standard_normal(data[..., :count, :].shape)
        found.append(Page(index, count, data))
    return found


def written(one: Capture, codec: str = "raw") -> bytes:
    return b"".join(bytes(piece) for piece in captures.encode(one, pages(one), codec=codec))


def read(data: bytes) -> tuple[Capture, list[Page]]:
    reader = Reader(io.BytesIO(data))
    return reader.capture, list(reader.pages())


def sealed(body: bytes) -> bytes:
    """With a right digest at the end: what a forger would write."""
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize("codec", ["raw", "lz4"])
@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 66, 129, 200])
def test_what_is_written_is_read(tokens: int, codec: str) -> None:
    one = capture(tokens)
    got, found = read(written(one, codec))
    assert got == one
    assert got.whole
    assert [(p.index, p.tokens) for p in found] == [(p.index, p.tokens) for p in pages(one)]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(found, pages(one), strict=True))


def test_the_layout_byte_by_byte() -> None:
    """As docs/handoff-file.md says."""
    one = capture(65)
    data = written(one)
    magic, version, flags, size = FIXED.unpack_from(data)
    assert (magic, version, flags) == (b"CFHANDOF", 1, 0)
    head = json.loads(data[FIXED.size : FIXED.size + size])["capture"]
    assert head["request"]["token_ids"] == list(one.request.token_ids)
    assert head["tokens"] == [[5, 6, 7]]
    at, kinds = FIXED.size + size, []
    while (length := struct.unpack_from("<I", data, at)[0]) != 0:
        header = data[at + 4 : at + 4 + length]
        assert header[:4] == b"CFKV"
        kinds.append(header[6])
        at += 4 + length + struct.unpack_from("<I", header, 48)[0]
    assert kinds == [1, 2, 3]
    assert data[at + 4 :] == hashlib.sha256(data[: at + 4]).digest()


def test_a_handoff_that_failed_early_keeps_its_pages_and_its_error() -> None:
    one = capture(200, pages=2, error="engine_failed: broke", tokens=((),), finishes=(None,))
    got, found = read(written(one))
    assert (got.error, got.whole, len(found)) == ("engine_failed: broke", False, 2)


def test_a_redacted_capture_tells_nothing_of_the_text() -> None:
    one = capture(200)
    secret = captures.redact(one, pages(one))
    data = b"".join(bytes(piece) for piece in captures.encode(secret))
    got, found = read(data)
    assert found == []
    assert (got.request.token_ids, got.request.salt, got.tokens) == ((), "", ((),))
    keys, _ = one.addresses()
    expected = [page_digest(key, p.tokens, p.data.tobytes()).hex() for key, p in zip(keys, pages(one), strict=True)]
    assert list(got.page_digests) == expected
    assert str(list(one.request.token_ids))[1:-1].replace(" ", "") not in data.decode(errors="replace")
    assert not got.whole


@pytest.mark.parametrize("count", [3, 5])
def test_a_wrong_number_of_pages_is_not_written(count: int) -> None:
    one = capture(200)
    given_pages = (pages(one) + pages(capture(300))[4:])[:count]
    with pytest.raises((CaptureError, EngineError)):
        list(captures.encode(one, given_pages))


def test_pages_out_of_order_are_not_written() -> None:
    one = capture(200)
    with pytest.raises(CaptureError, match="page 1 came where page 0"):
        list(captures.encode(one, pages(one)[::-1][2:]))


# What must not get through


def test_one_flipped_byte_of_a_page_names_the_frame() -> None:
    one = capture(200)
    data = bytearray(written(one))
    third = pages(one)[2].data.tobytes()
    data[bytes(data).index(third) + 77] ^= 1
    reader = Reader(io.BytesIO(bytes(data)))
    got: list[Page] = []
    with pytest.raises(CaptureError, match=r"frame 3 \(page 2\): wrong digest of payload"):
        got.extend(reader.pages())
    assert [page.index for page in got] == [0, 1]  # extended by what came before


@settings(max_examples=60, deadline=None)
@given(at=st.integers(min_value=0), bit=st.integers(0, 7), reseal=st.booleans())
def test_any_flipped_bit_is_found(at: int, bit: int, reseal: bool) -> None:
    """Resealed: with a fresh digest at the end. Then a changed head may pass for another head, never for pages."""
    one = capture(130)
    data = bytearray(written(one))
    at %= len(data)
    data[at] ^= 1 << bit
    damaged = sealed(bytes(data[:-32])) if reseal else bytes(data)
    try:
        got, found = read(damaged)
    except CaptureError:
        return
    assert reseal
    assert at >= len(data) - 32 or got != one
    assert all(np.array_equal(a.data, b.data) for a, b in zip(found, pages(one), strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(min_value=0))
def test_any_truncation_is_found(size: int) -> None:
    data = written(capture(130))
    with pytest.raises(CaptureError):
        read(data[: size % len(data)])


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_noise_is_refused(noise: bytes, begins_well: bool) -> None:
    start = FIXED.pack(b"CFHANDOF", 1, 0, len(noise)) if begins_well else b""
    with pytest.raises(CaptureError):
        read(sealed(start + noise))


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_any_json_as_a_head_is_refused(value: object) -> None:
    head = json.dumps({"capture": value}).encode()
    with pytest.raises(CaptureError):
        read(sealed(FIXED.pack(b"CFHANDOF", 1, 0, len(head)) + head + bytes(4)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"contract": {"layers": 1 << 40}}, "no model's"),
        ({"contract": {"layers": -1}}, "no model's"),
        ({"contract": {"wire_version": 2}}, "wire version 2"),
        ({"contract": {"novel": 2}}, "contract.novel"),
        ({"request": {"token_ids": [1, 2000]}}, "outside the vocabulary"),
        ({"request": {"token_ids": [1, -1]}}, "outside the vocabulary"),
        ({"request": {"token_ids": []}}, "prompt is empty"),
        ({"request": {"handoff_id": "../../etc"}}, "handoff id"),
        ({"request": {"token_ids": [1, 2]}}, "200 are announced"),
        ({"pages": 5}, "5 pages are announced"),
        ({"pages": 3}, "4 of 3 pages|page 3"),
        ({"redacted": True}, "a redacted capture holds no token ids"),
        ({"prompt_tokens": "many"}, "prompt_tokens"),
        ({"novel": 1}, "novel"),
    ],
)
def test_a_forged_head_is_refused_by_name(change: dict[str, object], said: str) -> None:
    data = written(capture(200))
    size = FIXED.unpack_from(data)[3]
    head = json.loads(data[FIXED.size : FIXED.size + size])
    for name, value in change.items():
        below = head["capture"].get(name)
        head["capture"][name] = below | value if isinstance(below, dict) and isinstance(value, dict) else value
    text = json.dumps(head).encode()
    forged = FIXED.pack(b"CFHANDOF", 1, 0, len(text)) + text + data[FIXED.size + size : -32]
    with pytest.raises(CaptureError, match=said):
        read(sealed(forged))


def test_a_newer_file_is_refused_as_such() -> None:
    data = bytearray(written(capture(65)))
    struct.pack_into("<H", data, 8, 2)
    with pytest.raises(CaptureError, match="a newer Crossfill wrote this"):
        read(sealed(bytes(data[:-32])))


def test_pages_of_another_prompt_are_refused() -> None:
    """A whole, honest transfer behind the head of another prompt of the same length."""
    ours, theirs = written(capture(200)), capture(200)
    theirs = replace(theirs, request=replace(theirs.request, token_ids=theirs.request.token_ids[::-1]))
    size, other = FIXED.unpack_from(ours)[3], written(theirs)
    forged = other[: FIXED.size + FIXED.unpack_from(other)[3]] + ours[FIXED.size + size : -32]
    with pytest.raises(CaptureError, match=r"frame 0 \(OPEN\): wrong prompt digest"):
        read(sealed(forged))


def test_nothing_may_follow_the_end() -> None:
    with pytest.raises(CaptureError, match="follows the digest"):
        read(written(capture(65)) + b"x")


def test_a_head_of_gigabytes_is_not_read() -> None:
    with pytest.raises(CaptureError, match="claims 4294967295 bytes"):
        read(FIXED.pack(b"CFHANDOF", 1, 0, 0xFFFFFFFF))
