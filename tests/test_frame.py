"""Frames: golden bytes, round trips, and refusal of every damaged, foreign, missing or misplaced frame."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import header as headers
from pipeline import prefix
from pipeline.errors import ConfigError, EngineError, FrameError
from pipeline.frame import AbortedError, Commit, Frame, FrameReader, FrameWriter, Kind, page_digest, transfer_digest
from pipeline.handoff import Attempts
from pipeline.header import Header, encode
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, PageArray, PageShape, page_tokens

GOLDEN = Path(__file__).parent / "golden"
SHAPE = PageShape(layers=1, kv_heads=1, head_dim=2)  # 512 bytes a page
ID = "00112233445566778899aabbccddeeff"
OTHER_ID = "ffeeddccbbaa99887766554433221100"
ATTEMPTS = Attempts(prefill=3, decode=2)
START = prefix.seed("c" * 64, "")
PROMPT = tuple(range(100, 300))  # 200 tokens: 199 travel, 4 pages, the last with 7
TOKENS = len(PROMPT) - 1
KEYS = prefix.chain(START, PROMPT[:-1])
DIGEST = prefix.prompt_digest(START, PROMPT)


def make_page(index: int, *, tokens: int = TOKENS, salt: int = 0) -> Page:
    """Values that count up, so that no two pages and no two places are alike."""
    valid = page_tokens(index, tokens)
    data = SHAPE.empty()
    data[:, :, :, :valid] = (np.arange(4 * valid, dtype=np.float16) + 300 * index + salt).reshape(1, 2, 1, valid, 2)
    return Page(index, valid, data)


def writer(codec: str = "raw", *, handoff_id: str = ID, attempts: Attempts = ATTEMPTS) -> FrameWriter:
    return FrameWriter(handoff_id, attempts, SHAPE, KEYS, DIGEST, codec=codec)


def reader(first_page: int = 0, tokens: int = TOKENS) -> FrameReader:
    return FrameReader(ID, ATTEMPTS, SHAPE, KEYS, DIGEST, first_page=first_page, transfer_tokens=tokens)


def transfer(codec: str = "raw", first_page: int = 0, first_tokens: Sequence[int] = ()) -> list[Frame]:
    out = writer(codec)
    frames = [out.open(), *(out.page(make_page(index)) for index in range(first_page, 4))]
    return [*frames, out.commit(first_tokens)]


def receive(into: FrameReader, frame: Frame) -> Page | Commit | None:
    """What the stream does with one frame."""
    header = into.header(bytes(frame.header))
    if header.kind is Kind.PAGE:
        return into.page(header, frame.payload)
    if header.kind is Kind.COMMIT:
        return into.commit(header)
    if header.kind is Kind.ABORT:
        raise into.abort(header)
    into.open(header)
    return None


def fed(count: int, first_page: int = 0) -> tuple[FrameReader, list[Frame]]:
    """A reader that has accepted the first `count` frames of a whole transfer, and all its frames."""
    into, frames = reader(first_page), transfer(first_page=first_page)
    for frame in frames[:count]:
        receive(into, frame)
    return into, frames


def forged(frame: Frame, **changes: Any) -> Frame:
    """The frame with other fields and a right header digest: what a buggy peer would send."""
    return Frame(headers.encode(headers.decode(frame.header)._replace(**changes)), frame.payload)


# -- golden bytes: (file, how it is made, fields by (name, offset, struct format, value))

GOLDEN_PAGE = make_page(3)
COMMON = [("magic", 0, "4s", b"CFKV"), ("version", 4, "<H", 1), ("flags", 8, "<I", 0), ("reserved", 42, "<H", 0)]
COMMON += [("handoff", 12, "16s", bytes.fromhex(ID)), ("prefill", 28, "<H", 3), ("decode", 30, "<H", 2)]
TABLE: list[tuple[str, list[tuple[str, int, str, object]]]] = [
    ("open", [("kind", 6, "B", 1), ("sequence", 32, "<I", 0), ("key", 56, "32s", DIGEST), ("raw", 44, "<I", 0)]),
    (
        "page-raw",
        [
            ("kind", 6, "B", 2),
            ("codec", 7, "B", 0),
            ("sequence", 32, "<I", 1),
            ("index", 36, "<I", 3),
            ("tokens", 40, "<H", 7),
            ("raw", 44, "<I", 512),
            ("payload", 48, "<I", 512),
            ("body", 52, "<I", 0),
            ("key", 56, "32s", KEYS[3]),
            ("digest", 88, "16s", xxhash.xxh3_128_digest(KEYS[3] + b"\x07\x00" + GOLDEN_PAGE.data.tobytes())),
        ],
    ),
    (
        "page-lz4",
        [
            ("codec", 7, "B", 1),
            ("raw", 44, "<I", 512),
            ("digest", 88, "16s", page_digest(KEYS[3], 7, GOLDEN_PAGE.data.tobytes())),
        ],
    ),
    ("page-zstd", [("codec", 7, "B", 2), ("digest", 88, "16s", page_digest(KEYS[3], 7, GOLDEN_PAGE.data.tobytes()))]),
    ("page-int8", [("codec", 7, "B", 3), ("raw", 44, "<I", 512), ("payload", 48, "<I", 4 * 4 + 256)]),
    ("commit", [("kind", 6, "B", 3), ("index", 36, "<I", 1), ("body", 52, "<I", 8), ("first", 104, "<2I", 17)]),
    (
        "commit-logprobs",
        [
            ("kind", 6, "B", 3),
            ("tokens", 40, "<H", 3),
            ("body", 52, "<I", 48),
            ("first", 104, "<I", 17),
            ("second", 108, "<I", 4_000_000_000),
            ("its logprob", 112, "<f", -0.5),
            ("the likeliest", 116, "<I", 9),
            ("and its logprob", 120, "<f", -0.25),
            ("the last", 148, "<f", -4.0),
        ],
    ),
    ("abort", [("kind", 6, "B", 4), ("key", 56, "32s", bytes(32)), ("digest", 88, "16s", bytes(16))]),
]


LOGPROBS = (
    TokenLogprob(17, -0.5, ((9, -0.25), (17, -0.5))),
    TokenLogprob(4_000_000_000, -3.0, ((9, -0.25), (5, -4.0))),
)


def golden(name: str) -> Frame:
    out = writer(name.removeprefix("page-") if name.startswith("page-") else "raw")
    made = {"open": out.open()}
    if name.startswith("page"):
        return out.page(GOLDEN_PAGE)
    if name == "commit":
        out.page(GOLDEN_PAGE)
        return out.commit((17, 4_000_000_000))
    if name == "commit-logprobs":
        return out.commit((17, 4_000_000_000), LOGPROBS)
    return out.abort("engine_failed", "out of memory: größer") if name == "abort" else made[name]


@pytest.mark.parametrize("name", [name for name, _ in TABLE])
def test_golden_bytes_whole(name: str) -> None:
    frame = golden(name)
    assert (GOLDEN / f"{name}.header").read_bytes() == frame.header
    stored = GOLDEN / f"{name}.payload"
    assert (stored.read_bytes() if stored.exists() else b"") == bytes(frame.payload)


@pytest.mark.parametrize(("name", "fields"), TABLE)
def test_golden_bytes_field_by_field(name: str, fields: list[tuple[str, int, str, object]]) -> None:
    data = (GOLDEN / f"{name}.header").read_bytes()
    for field, offset, form, value in [*COMMON, *fields]:
        assert struct.unpack_from(form, data, offset)[0] == value, field
    body_bytes = struct.unpack_from("<I", data, 52)[0]
    assert len(data) == 112 + body_bytes
    assert struct.unpack_from("<Q", data, 104 + body_bytes)[0] == xxhash.xxh3_64_intdigest(data[: 104 + body_bytes])


def test_golden_logprobs_are_read_back() -> None:
    into = reader(first_page=4)
    receive(into, writer().open())
    frame = Frame((GOLDEN / "commit-logprobs.header").read_bytes(), b"")
    assert receive(into, frame) == Commit(0, (17, 4_000_000_000), LOGPROBS)


def test_golden_abort_says_what_was_said() -> None:
    data = (GOLDEN / "abort.header").read_bytes()
    assert json.loads(data[104:-8]) == {"code": "engine_failed", "message": "out of memory: größer"}


@pytest.mark.parametrize("name", ["page-raw", "page-lz4", "page-zstd"])
def test_golden_pages_are_read_back(name: str) -> None:
    into = reader(first_page=3)
    receive(into, golden("open"))
    stored = Frame((GOLDEN / f"{name}.header").read_bytes(), (GOLDEN / f"{name}.payload").read_bytes())
    page = receive(into, stored)
    assert isinstance(page, Page)
    assert (page.index, page.tokens) == (3, 7)
    np.testing.assert_array_equal(page.data, GOLDEN_PAGE.data)


# -- round trips


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd"])
@pytest.mark.parametrize("first_page", [0, 1, 3, 4])
def test_a_whole_transfer(codec: str, first_page: int) -> None:
    into = reader(first_page)
    got = [receive(into, frame) for frame in transfer(codec, first_page, (5, 6))]
    assert got[0] is None
    assert got[-1] == Commit(4 - first_page, (5, 6))
    for index, page in enumerate(got[1:-1], first_page):
        assert isinstance(page, Page)
        assert (page.index, page.tokens) == (index, page_tokens(index, TOKENS))
        np.testing.assert_array_equal(page.data, make_page(index).data)


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 200),
    bits=st.integers(0, 0xFFFF),
    codec=st.sampled_from(["raw", "lz4", "zstd", "auto"]),
    first=st.lists(st.integers(0, 2**32 - 1), max_size=64),
)
def test_round_trip_of_any_finite_page(tokens: int, bits: int, codec: str, first: list[int]) -> None:
    keys = prefix.chain(START, range(tokens))
    out = FrameWriter(ID, ATTEMPTS, SHAPE, keys, DIGEST, codec=codec)
    into = FrameReader(ID, ATTEMPTS, SHAPE, keys, DIGEST, first_page=0, transfer_tokens=tokens)
    receive(into, out.open())
    for index in range(-(-tokens // 64)):
        sent = make_page(index, tokens=tokens)
        value = np.uint16(bits).view(np.float16)
        sent.data[0, 1, 0, 0, 1] = value if np.isfinite(value) else 1
        got = receive(into, out.page(sent))
        assert isinstance(got, Page)
        assert (got.index, got.tokens, got.data.tobytes()) == (index, sent.tokens, sent.data.tobytes())
    assert receive(into, out.commit(first)) == Commit(-(-tokens // 64), tuple(first))


def test_each_side_looks_through_a_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is as large as a cache: a second look costs as much as its digest."""
    looks: list[PageArray] = []

    def look(data: PageArray) -> bool:
        looks.append(data)
        return True

    monkeypatch.setattr("pipeline.frame.is_finite", look)
    frames, into = transfer(), reader()
    assert len(looks) == 4
    for each in frames:
        receive(into, each)
    assert len(looks) == 8


def test_a_raw_payload_is_the_array_itself() -> None:
    page = make_page(0)
    out = writer()
    payload = out.page(page).payload
    assert isinstance(payload, memoryview)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), page.data)


def test_a_page_that_does_not_shrink_goes_out_raw() -> None:
    page = Page(0, 64, np.random.default_rng(0).standard_normal(SHAPE.array).astype(np.float16))
    frame = writer("lz4").page(page)
    assert headers.decode(frame.header).codec_id == 0
    assert len(frame.payload) == 512


def test_a_lossy_page_arrives_as_it_was_digested_and_only_where_it_was_asked_for() -> None:
    """Half a step of 254 over a channel's range is the most that a value may be off; padding stays zero."""
    noise = np.random.default_rng(0).standard_normal(SHAPE.array).astype(np.float16)
    noise[:, :, :, 7:] = 0
    out, sent = writer("int8"), Page(3, 7, noise)
    opened, frame = out.open(), out.page(sent)
    assert len(frame.payload) == 4 * 4 + 256
    asked = FrameReader(ID, ATTEMPTS, SHAPE, KEYS, DIGEST, first_page=3, transfer_tokens=TOKENS, codecs=("raw", "int8"))
    receive(asked, opened)
    page = receive(asked, frame)
    assert isinstance(page, Page)
    step = np.abs(noise.astype(np.float64)).max(axis=3, keepdims=True) / 127
    assert np.abs(page.data - noise.astype(np.float64) <= 0.51 * step).all()
    assert not np.array_equal(page.data, noise)
    assert not page.data[:, :, :, 7:].any()
    assert receive(asked, out.commit()) == Commit(1, ())
    unasked = reader(first_page=3)
    receive(unasked, opened)
    with pytest.raises(FrameError, match="wrong codec: expected one of raw, lz4, zstd, got int8"):
        receive(unasked, frame)


# -- damage


@pytest.mark.parametrize("which", [0, 1, 4, 5])
def test_every_damaged_byte_of_a_header_is_refused(which: int) -> None:
    into, frames = fed(which)
    data = frames[which].header
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            with pytest.raises(FrameError):
                into.header(damaged)
    receive(into, frames[which])  # and the reader is where it was


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd"])
@pytest.mark.parametrize("index", [0, 3])
def test_every_damaged_byte_of_a_payload_is_refused(codec: str, index: int) -> None:
    into, frames = reader(), transfer(codec)
    for frame in frames[: 1 + index]:
        receive(into, frame)
    frame = frames[1 + index]
    payload = bytes(frame.payload)
    header = into.header(frame.header)
    for at in range(len(payload)):
        damaged = payload[:at] + bytes([payload[at] ^ 0x10]) + payload[at + 1 :]
        try:
            got = into.page(header, damaged)
        except FrameError:
            continue
        # some blocks have two spellings of one content: then it is the right page all the same
        assert codec != "raw"
        np.testing.assert_array_equal(got.data, make_page(index).data)
        into, frames = reader(), transfer(codec)
        for earlier in frames[: 1 + index]:
            receive(into, earlier)
    assert isinstance(into.page(header, payload), Page)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(max_size=300))
def test_noise_is_never_a_frame(data: bytes) -> None:
    with pytest.raises(FrameError):
        reader().header(data)


@given(cut=st.integers(0, 511), codec=st.sampled_from(["raw", "lz4"]))
def test_a_truncated_payload_is_refused(cut: int, codec: str) -> None:
    into, frames = reader(), transfer(codec)
    receive(into, frames[0])
    header = into.header(frames[1].header)
    payload = bytes(frames[1].payload)
    with pytest.raises(FrameError, match="size of payload"):
        into.page(header, payload[: min(cut, len(payload) - 1)])
    with pytest.raises(FrameError, match="size of payload"):
        into.page(header, payload + b"\0")


def test_every_truncated_header_is_refused() -> None:
    into, frames = fed(5)
    for size in range(len(frames[5].header)):
        with pytest.raises(FrameError):
            into.header(frames[5].header[:size])
    with pytest.raises(FrameError):
        into.header(frames[5].header + b"\0")


# -- order


@settings(max_examples=150)
@given(order=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_any_other_order_than_the_right_one_is_refused(order: list[int]) -> None:
    into, frames = reader(), transfer()
    accepted = 0
    for which in order:
        if which == accepted:
            receive(into, frames[which])
            accepted += 1
        else:
            with pytest.raises(FrameError):
                receive(into, frames[which])


def test_nothing_comes_after_commit() -> None:
    into, frames = fed(6)
    out = writer()
    out.sequence = 6
    for late in (*frames, out.commit()):
        with pytest.raises(FrameError, match="none after the last"):
            receive(into, late)


def test_commit_before_the_last_page_is_refused() -> None:
    into = reader()
    out = writer()
    receive(into, out.open())
    receive(into, out.page(make_page(0)))
    with pytest.raises(FrameError, match="number of pages"):
        receive(into, out.commit())


def test_a_page_before_the_wanted_one_is_refused() -> None:
    into = reader(first_page=1)
    for frame in transfer()[:1]:
        receive(into, frame)
    with pytest.raises(FrameError, match="page index: expected 1 of 4, got 0"):
        receive(into, transfer()[1])


def test_two_swapped_payloads_are_refused_although_each_is_whole() -> None:
    into, frames = fed(1)
    header = into.header(frames[1].header)
    with pytest.raises(FrameError, match="digest of payload"):
        into.page(header, frames[2].payload)


def test_a_page_of_another_prompt_is_refused_although_its_digest_is_right() -> None:
    keys = prefix.chain(START, range(500, 699))
    foreign = FrameWriter(ID, ATTEMPTS, SHAPE, keys, DIGEST)
    foreign.open()
    into, _ = fed(1)
    with pytest.raises(FrameError, match="chain key"):
        receive(into, foreign.page(make_page(0)))


def test_the_same_values_under_another_key_have_another_digest() -> None:
    data = make_page(0).data.tobytes()
    assert len({page_digest(KEYS[0], 64, data), page_digest(KEYS[1], 64, data), page_digest(KEYS[0], 63, data)}) == 3


# -- wrong fields under a right header digest


@pytest.mark.parametrize(
    ("which", "changes", "match"),
    [
        (0, {"handoff_id": OTHER_ID}, "handoff id"),
        (0, {"attempts": Attempts(2, 2)}, "attempts"),
        (0, {"attempts": Attempts(3, 3)}, "attempts"),
        (0, {"sequence": 1}, "sequence"),
        (0, {"kind": Kind.PAGE}, "first frame"),
        (0, {"key": bytes(32)}, "prompt digest"),
        (0, {"tokens": 1}, "tokens"),
        (0, {"payload_bytes": 5}, "payload_bytes"),
        (0, {"body": b"x"}, "body"),
        (1, {"kind": Kind.OPEN}, "first frame"),
        (1, {"codec_id": 9}, "unknown codec id 9"),
        (1, {"index": 1}, "page index"),
        (1, {"index": 0xFFFFFFFF}, "page index"),
        (1, {"tokens": 63}, "tokens of page"),
        (1, {"raw_bytes": 1024}, "page size"),
        (1, {"payload_bytes": 513}, "size of payload"),
        (1, {"payload_bytes": 0}, "size of payload"),
        (1, {"payload_bytes": 0xFFFFFFFF}, "size of payload"),
        (1, {"key": KEYS[1]}, "chain key"),
        (1, {"body": b"1234"}, "body"),
        (5, {"index": 3}, "number of pages"),
        (5, {"key": KEYS[0]}, "prompt digest"),
        (5, {"digest": bytes(16)}, "digest of transfer"),
        (5, {"body": b"123"}, "multiple of 4"),
        (5, {"body": bytes(4 * 65)}, "first tokens"),
        (5, {"raw_bytes": 1}, "raw_bytes"),
    ],
)
def test_wrong_fields_are_named(which: int, changes: dict[str, object], match: str) -> None:
    into, frames = fed(which)
    with pytest.raises(FrameError, match=match):
        into.header(forged(frames[which], **changes).header)


def test_a_body_larger_than_allowed_is_refused_by_size() -> None:
    into, frames = fed(5)
    with pytest.raises(FrameError, match="size of header"):
        into.header(forged(frames[5], body=bytes(4000)).header)


@pytest.mark.parametrize(("offset", "match"), [(0, "magic"), (4, "wire version"), (52, "size of body")])
def test_foreign_headers_are_told_apart(offset: int, match: str) -> None:
    data = bytearray(transfer()[0].header)
    data[offset] ^= 0x02
    with pytest.raises(FrameError, match=match):
        reader().header(bytes(data))


def resealed(data: bytes, at: int, value: int) -> bytes:
    body = data[:at] + bytes([value]) + data[at + 1 : -8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@pytest.mark.parametrize(("at", "value", "match"), [(6, 0, "kind"), (6, 5, "kind"), (8, 1, "flags"), (43, 1, "flags")])
def test_fields_of_a_later_version_are_refused(at: int, value: int, match: str) -> None:
    with pytest.raises(FrameError, match=match):
        reader().header(resealed(transfer()[0].header, at, value))


# -- bad contents under right digests


def _bad(change: Callable[[Page], None], index: int = 3) -> Page:
    page = make_page(index)
    change(page)
    return page


def _set(place: tuple[int, ...], value: float) -> Callable[[Page], None]:
    def change(page: Page) -> None:
        page.data[place] = value

    return change


BAD_PAGES = [
    _bad(_set((0, 0, 0, 0, 0), np.nan)),
    _bad(_set((0, 1, 0, 6, 1), np.inf)),
    _bad(_set((0, 1, 0, 6, 0), -np.inf)),
    _bad(_set((0, 0, 0, 7, 0), 1.0)),
    _bad(_set((0, 1, 0, 63, 1), -1.0)),
]


@pytest.mark.parametrize("page", BAD_PAGES)
def test_nan_inf_and_dirty_padding_leave_neither_the_producer_nor_pass_the_consumer(page: Page) -> None:
    out = writer()
    out.open()
    with pytest.raises(EngineError, match="page 3"):
        out.page(page)
    into = reader(first_page=3)
    receive(into, transfer(first_page=3)[0])
    digest = page_digest(KEYS[3], 7, page.data.tobytes())
    header = into.header(forged(transfer(first_page=3)[1], digest=digest).header)
    with pytest.raises(FrameError, match="wrong page"):
        into.page(header, page.data.tobytes())


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((2, 2, 1, 64, 2), np.float16),
        np.zeros(SHAPE.array, np.float32),
        np.zeros(SHAPE.array, ">f2"),
        np.zeros((1, 2, 1, 2, 64), np.float16).transpose(0, 1, 2, 4, 3),
    ],
)
def test_a_page_that_is_not_canonical_does_not_leave(data: PageArray) -> None:
    with pytest.raises(EngineError, match="not contiguous float16"):
        writer().page(Page(0, 64, data))


@pytest.mark.parametrize("tokens", [0, 65])
def test_a_page_of_no_or_too_many_tokens_does_not_leave(tokens: int) -> None:
    with pytest.raises(EngineError):
        writer().page(Page(0, tokens, SHAPE.empty()))


def test_pages_leave_in_order() -> None:
    out = writer()
    out.page(make_page(1))
    for index in (0, 1, 3):
        with pytest.raises(EngineError, match="out of order: 2 comes next"):
            out.page(make_page(index))
    with pytest.raises(EngineError, match="of 4 is out of order"):
        writer().page(Page(4, 64, SHAPE.empty()))


# -- abort


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_abort_may_come_anywhere_and_ends_the_transfer(count: int) -> None:
    into, frames = fed(count)
    out = writer()
    out.sequence = count + 2  # frames that P made and could not send
    with pytest.raises(AbortedError) as caught:
        receive(into, out.abort("engine_failed", "no memory"))
    assert (caught.value.peer_code, caught.value.peer_message) == ("engine_failed", "no memory")
    with pytest.raises(FrameError, match="none after the last"):
        into.header(frames[count].header)


def test_an_abort_from_the_past_is_refused() -> None:
    into, _ = fed(3)
    out = writer()
    out.sequence = 2
    with pytest.raises(FrameError, match="sequence"):
        into.header(out.abort("x", "y").header)


@given(code=st.text(max_size=100), message=st.text(max_size=3000))
def test_any_error_text_fits_into_an_abort(code: str, message: str) -> None:
    with pytest.raises(AbortedError) as caught:
        receive(reader(), writer().abort(code, message))
    assert caught.value.peer_message in ("", message[:500])


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"code":1,"message":"x"}', b"[" * 2000, b"\xff"])
def test_a_malformed_abort_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        reader().header(forged(writer().abort("a", "b"), body=body).header)


# -- construction


@pytest.mark.parametrize("handoff_id", ["", "x" * 32, ID.upper(), ID[:-1], ID + "0", ID[:-1] + "\n", "{a}*" * 8])
def test_only_uuid_hex_is_a_handoff_id(handoff_id: str) -> None:
    with pytest.raises(FrameError, match="handoff id"):
        writer(handoff_id=handoff_id)
    with pytest.raises(FrameError, match="handoff id"):
        FrameReader(handoff_id, ATTEMPTS, SHAPE, KEYS, DIGEST, first_page=0, transfer_tokens=1)


@pytest.mark.parametrize("attempts", [Attempts(0, 1), Attempts(1, 0), Attempts(65536, 1)])
def test_attempts_that_no_frame_can_carry(attempts: Attempts) -> None:
    with pytest.raises(FrameError, match="attempt"):
        writer(attempts=attempts)


def test_an_unknown_codec_and_too_many_first_tokens() -> None:
    with pytest.raises(ConfigError, match="unknown codec"):
        writer("zip")
    with pytest.raises(FrameError, match="first tokens"):
        writer().commit(range(65))


@settings(max_examples=60)
@given(
    count=st.integers(1, 8),
    top=st.integers(0, 20),
    value=st.floats(max_value=0, allow_nan=False, width=32),
)
def test_logprobs_travel_with_the_first_tokens(count: int, top: int, value: float) -> None:
    logprobs = tuple(TokenLogprob(i, value, tuple((j, value) for j in range(top))) for i in range(count))
    out, into = writer(), reader(first_page=4)
    receive(into, out.open())
    assert receive(into, out.commit(range(count), logprobs)) == Commit(0, tuple(range(count)), logprobs)


@pytest.mark.parametrize(
    "logprobs",
    [
        LOGPROBS[:1],
        LOGPROBS[::-1],
        (LOGPROBS[0], TokenLogprob(4_000_000_000, -1.0)),
        tuple(TokenLogprob(one.token_id, -1.0, ((1, -1.0),) * 21) for one in LOGPROBS),
    ],
)
def test_logprobs_that_do_not_go_with_the_tokens(logprobs: tuple[TokenLogprob, ...]) -> None:
    with pytest.raises(FrameError, match="logprobs"):
        writer().commit((17, 4_000_000_000), logprobs)


@pytest.mark.parametrize(
    ("tokens", "body", "wrong"),
    [
        (22, bytes(22 * 8), "logprobs of a token"),
        (2, bytes(17), "size of body"),
        (0, bytes(6), "size of body"),
        (1, bytes(65 * 8), "first tokens"),
        (1, b"", "logprobs"),
        (1, struct.pack("<If", 7, math.nan), "logprobs"),
        (2, struct.pack("<IfIf", 7, -1.0, 8, math.nan), "logprobs"),
    ],
)
def test_a_commit_whose_logprobs_cannot_be(tokens: int, body: bytes, wrong: str) -> None:
    into = reader(first_page=4)
    receive(into, writer().open())
    digest = transfer_digest(DIGEST, [])
    header = encode(Header(Kind.COMMIT, 0, ID, ATTEMPTS, 1, tokens=tokens, key=DIGEST, digest=digest, body=body))
    with pytest.raises(FrameError, match=f"wrong {wrong}"):
        into.header(header)
