"""Pages across real servers: window, order of service, fencing, damage, a full server, lost replies."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from redis import Connection, Redis
from redis.exceptions import OutOfMemoryError
from redis.exceptions import TimeoutError as SilentError

from pipeline import prefix
from pipeline.broker import keys
from pipeline.broker.connect import connect
from pipeline.broker.credit import Credit, Grant, Outgoing, Sent, entry_id
from pipeline.broker.payload import Link, Word
from pipeline.broker.returns import Returns
from pipeline.broker.stream import PageReader, PageWriter, gauges, heartbeat, raise_fence, reap, release
from pipeline.errors import (
    BrokerError,
    BudgetTooSmallError,
    CapacityError,
    CrossfillError,
    DeadlineError,
    FrameError,
    HandoffCancelledError,
    PageMissingError,
    StaleAttemptError,
)
from pipeline.frame import AbortedError, Commit, FrameReader, FrameWriter
from pipeline.handoff import Attempts
from pipeline.page import Page, PageShape, page_count, page_tokens
from pipeline.settings import BrokerSettings

SHAPE = PageShape(layers=2, kv_heads=2, head_dim=8)  # 8 KiB a page
PAGE_BYTES = 8192
FIRST = Attempts(1, 1)
START = prefix.seed("d" * 64, "salt")


def no_check() -> None:
    """Nobody wants this work to end."""


@dataclass
class Line:
    """One handoff under test: its prompt, its attempts, its client. `close` ends what it opened."""

    client: Redis
    tokens: int = 64 * 6 - 10
    budget_pages: float = 64
    attempts: Attempts = FIRST
    handoff_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    payload_ttl_s: float = 30
    codec: str = "raw"
    opened: list[PageWriter | PageReader] = field(default_factory=list)

    def another(self, **changes: Any) -> Line:
        """Another handoff, or with its id another attempt at this one; closed with it."""
        return replace(self, **({"handoff_id": uuid.uuid4().hex} | changes))

    def close(self) -> None:
        for end in self.opened:
            end.close()

    @property
    def settings(self) -> BrokerSettings:
        return BrokerSettings(budget_bytes=int(self.budget_pages * PAGE_BYTES), payload_ttl_s=self.payload_ttl_s)

    @property
    def names(self) -> keys.HandoffKeys:
        return keys.HandoffKeys(self.handoff_id)

    @property
    def pages(self) -> int:
        return page_count(self.tokens)

    def prompt(self) -> tuple[int, ...]:
        return tuple(range(self.tokens + 1))

    def page(self, index: int) -> Page:
        seed = int(self.handoff_id[:8], 16) + index
        tokens = page_tokens(index, self.tokens)
        page = Page(index, tokens, SHAPE.empty())
        page.data[:, :, :, :tokens] = np.random.default_rng(seed).standard_normal((2, 2, 2, tokens, 8))
        return page

    def fence(self) -> None:
        raise_fence(self.client, self.handoff_id, self.attempts, self.settings)

    def writer(self, check: Callable[[], None] = no_check, patience_s: float = 5.0) -> PageWriter:
        chain = prefix.chain(START, self.prompt()[:-1])
        digest = prefix.prompt_digest(START, self.prompt())
        frames = FrameWriter(self.handoff_id, self.attempts, SHAPE, chain, digest, codec=self.codec)
        writer = PageWriter(self.client, frames, self.settings, check, patience_s=patience_s)
        self.opened.append(writer)
        return writer

    def reader(self, first_page: int = 0, check: Callable[[], None] = no_check) -> PageReader:
        chain = prefix.chain(START, self.prompt()[:-1])
        digest = prefix.prompt_digest(START, self.prompt())
        frames = FrameReader(
            self.handoff_id, self.attempts, SHAPE, chain, digest, first_page=first_page, transfer_tokens=self.tokens
        )
        reader = PageReader(self.client, frames, self.settings, check)
        self.opened.append(reader)
        return reader

    def send(self, first_page: int = 0, upto: int | None = None) -> PageWriter:
        """OPEN and pages; the commit too when all pages go."""
        writer = self.writer()
        writer.open()
        for index in range(first_page, self.pages if upto is None else upto):
            writer.write(self.page(index))
        if upto is None:
            writer.commit((7,))
        writer.flush()
        return writer

    def receive(self, reader: PageReader, first_page: int = 0) -> None:
        """Everything, compared exactly."""
        for index in range(first_page, self.pages):
            page = reader.read(5)
            assert isinstance(page, Page)
            assert (page.index, page.tokens) == (index, page_tokens(index, self.tokens))
            np.testing.assert_array_equal(page.data, self.page(index).data)
            reader.imported()
        assert reader.read(5) == Commit(self.pages - first_page, (7,))

    def assert_nothing_remains(self) -> None:
        assert list(self.client.scan_iter(f"*{self.handoff_id}*")) == []
        assert gauges(self.client) == (0, 0, 0)
        for name in (keys.BUDGET_WAITERS, keys.BUDGET_WAITER_LEASES, keys.BUDGET_LEASES):
            assert self.client.zcard(name) == 0


@pytest.fixture
def line(server_url: str, redis_client: Redis) -> Iterator[Line]:
    with connect(server_url) as client:
        line = Line(client)
        line.fence()
        yield line
        line.close()


def small(line: Line, pages: float) -> Line:
    line.budget_pages = pages
    return line


# -- the whole way


@pytest.mark.parametrize("codec", ["raw", "lz4"])
@pytest.mark.parametrize("first_page", [0, 3, 6])
def test_a_transfer_arrives_exactly_and_leaves_nothing(line: Line, codec: str, first_page: int) -> None:
    line.codec = codec
    writer, reader = line.send(first_page), line.reader(first_page)
    assert writer.pages_written == 6 - first_page
    assert gauges(line.client).in_flight_bytes == writer.bytes_written
    line.receive(reader, first_page)
    assert reader.bytes_read == writer.bytes_written
    assert gauges(line.client) == (0, 0, 0)
    release(line.client, line.handoff_id)
    line.assert_nothing_remains()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 129])
def test_boundary_lengths(line: Line, tokens: int) -> None:
    line.tokens = tokens
    line.send()
    line.receive(line.reader())


def test_every_key_of_a_transfer_expires(line: Line) -> None:
    line.send(upto=2)
    for key in line.client.scan_iter(f"*{line.handoff_id}*"):
        assert 0 < line.client.pttl(key) <= 900_000, key


def test_a_codec_that_shrinks_gives_the_rest_of_the_credit_back(line: Line) -> None:
    line.codec = "lz4"
    writer = line.writer()
    writer.open()
    writer.write(Page(0, 64, SHAPE.empty()))
    writer.flush()
    assert 0 < writer.bytes_written < 200
    assert gauges(line.client) == (writer.bytes_written, 0, 1)


def test_a_lost_script_cache_heals(line: Line) -> None:
    writer = line.writer()
    writer.open()
    for index in range(line.pages):
        line.client.script_flush()
        writer.write(line.page(index))
    writer.commit((7,))
    reader = line.reader()
    line.client.script_flush()
    line.receive(reader)


# -- the window


def test_a_long_prompt_streams_through_a_window_of_two_pages(line: Line) -> None:
    small(line, 2).tokens = 64 * 20
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(line.send)
        reader, peak = line.reader(), 0
        for index in range(20):
            page = reader.read(10)
            assert isinstance(page, Page)
            assert page.index == index
            time.sleep(0.01)  # the writer runs into its limit
            peak = max(peak, gauges(line.client).in_flight_bytes)
            reader.imported()
        assert reader.read(10) == Commit(20, (7,))
        assert sent.result(60).bytes_written == 20 * PAGE_BYTES
    assert PAGE_BYTES <= peak <= 2 * PAGE_BYTES


def test_a_page_larger_than_the_budget_is_refused(line: Line) -> None:
    with pytest.raises(BudgetTooSmallError):
        small(line, 0.5).send()
    assert gauges(line.client).in_flight_bytes == 0


def test_a_stopped_decoder_stalls_only_itself(line: Line) -> None:
    """Budget 32 pages, share an eighth: four pages wait for the stopped one, everybody else goes on."""
    small(line, 32).tokens = 64 * 6
    stop = [False]

    def check() -> None:
        if stop[0]:
            raise HandoffCancelledError("enough")

    def stalled() -> None:
        writer = line.writer(check)
        writer.open()
        for index in range(6):
            writer.write(line.page(index))
        writer.flush()

    with ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(stalled)
        while gauges(line.client).waiters == 0:
            time.sleep(0.01)
        assert gauges(line.client) == (4 * PAGE_BYTES, 1, 1)
        for _ in range(3):
            other = line.another(budget_pages=32, tokens=64 * 20)
            other.fence()
            sent = pool.submit(other.send)
            other.receive(other.reader())
            sent.result(60)
            release(other.client, other.handoff_id)
        assert not blocked.done()
        stop[0] = True
        with pytest.raises(HandoffCancelledError):
            blocked.result(60)
    release(line.client, line.handoff_id)
    line.assert_nothing_remains()


def test_a_big_one_is_not_starved_by_small_ones(line: Line) -> None:
    """The line is served by arrival, whoever asks how often, until its head got what it needs."""
    settings = BrokerSettings(budget_bytes=10)
    ids = [uuid.uuid4().hex for _ in range(4)]
    asking = [Credit(line.client, handoff_id, Attempts(1, 1), settings) for handoff_id in ids]
    for handoff_id in ids:
        raise_fence(line.client, handoff_id, Attempts(1, 1), settings)
    first, big, *small_ones = asking
    assert first.reserve(0, 4)
    assert first.reserve(1, 4)
    assert not big.reserve(0, 9)
    for _ in range(5):
        assert not any(small_one.reserve(0, 1) for small_one in small_ones)
    first.give_back([0])
    assert not any(small_one.reserve(0, 1) for small_one in small_ones)
    first.give_back([1])
    assert not small_ones[0].reserve(0, 1)
    assert big.reserve(0, 9)
    assert small_ones[0].reserve(0, 1)
    assert not small_ones[1].reserve(0, 1)


def test_a_place_in_the_line_without_a_wish_is_dropped_when_it_is_over(line: Line) -> None:
    """As an operator's DEL of a key, or a restore of some of them, leaves it."""
    line.client.zadd(keys.BUDGET_WAITERS, {"f" * 32: 0})
    line.send()
    line.receive(line.reader())
    release(line.client, line.handoff_id)
    line.assert_nothing_remains()


def test_release_wakes_a_writer_that_waits(line: Line) -> None:
    small(line, 2).send(upto=2)
    other = line.another(budget_pages=2, tokens=64)
    other.fence()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(other.send)
        while gauges(line.client).waiters == 0:
            time.sleep(0.01)
        release(line.client, line.handoff_id)
        other.receive(other.reader())
        sent.result(60)


# -- fences


def test_a_stale_writer_is_fenced_before_and_after_its_credit(line: Line) -> None:
    writer = line.send(upto=1)
    newer = line.another(handoff_id=line.handoff_id, attempts=Attempts(2, 1))
    newer.fence()
    writer.write(line.page(1))
    with pytest.raises(StaleAttemptError):
        writer.flush()
    with pytest.raises(StaleAttemptError):
        writer.commit()
    assert gauges(line.client) == (0, 0, 0)
    newer.send()
    newer.receive(newer.reader())


def after_the_credit(writer: PageWriter, then: Callable[[], object]) -> None:
    """`then` happens between the first credit and its payload."""
    exchange = writer._credit.exchange

    def exchange_then(frames: Sequence[Outgoing], wanted: Sequence[int], size: int) -> tuple[Sent, Grant]:
        sent, grant = exchange(frames, wanted, size)
        if grant.number:
            then()
        return sent, grant

    writer._credit.exchange = exchange_then  # type: ignore[method-assign]


def test_a_zombie_that_had_its_credit_leaves_no_payload(line: Line) -> None:
    writer = line.writer()
    writer.open()
    newer = line.another(handoff_id=line.handoff_id, attempts=Attempts(1, 2))
    after_the_credit(writer, newer.fence)
    writer.write(line.page(0))
    with pytest.raises(StaleAttemptError):
        writer.flush()
    assert list(line.client.scan_iter(f"*{line.handoff_id}*")) == [line.names.fence.encode()]
    assert gauges(line.client) == (0, 0, 0)


def test_fences_only_rise(line: Line) -> None:
    for attempts in (Attempts(2, 1), Attempts(2, 1), Attempts(2, 2), Attempts(3, 2)):
        raise_fence(line.client, line.handoff_id, attempts, line.settings)
    for attempts in (Attempts(1, 1), Attempts(2, 2), Attempts(4, 1), Attempts(2, 9)):
        with pytest.raises(StaleAttemptError):
            raise_fence(line.client, line.handoff_id, attempts, line.settings)
    assert line.client.get(line.names.fence) == b"3.2"


def test_the_same_fence_again_keeps_what_was_sent(line: Line) -> None:
    line.send()
    line.fence()
    line.receive(line.reader())


def test_a_reader_notices_that_it_was_replaced(line: Line) -> None:
    reader = line.reader()
    newer = line.another(handoff_id=line.handoff_id, attempts=Attempts(2, 1))
    newer.fence()
    with pytest.raises(StaleAttemptError):
        reader.read(5)
    newer.send()
    with pytest.raises(StaleAttemptError):
        line.reader().read(5)


@pytest.mark.parametrize("lose", ["release", "flush"])
def test_a_transfer_that_is_gone_ends_both_sides(line: Line, lose: str) -> None:
    writer, reader = line.send(upto=1), line.reader()
    assert isinstance(reader.read(5), Page)
    if lose == "release":
        release(line.client, line.handoff_id)
    else:
        line.client.flushall()
    reader.imported()
    with pytest.raises(PageMissingError):
        reader.read(5)
    writer.write(line.page(1))
    with pytest.raises(StaleAttemptError):
        writer.flush()
    line.assert_nothing_remains()


# -- blocking


def test_an_idle_reader_meets_its_deadline(line: Line) -> None:
    with pytest.raises(DeadlineError):
        line.reader().read(0.3)


@pytest.mark.parametrize("side", ["reader", "writer"])
def test_check_ends_a_wait(line: Line, side: str) -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 5:
            raise HandoffCancelledError("the client is gone")

    def write_on() -> None:
        writer = small(line, 1).writer(check)
        writer.open()
        for index in range(line.pages):
            writer.write(line.page(index))
        writer.flush()

    blocked = {"reader": lambda: line.reader(check=check).read(60), "writer": write_on}[side]
    with pytest.raises(HandoffCancelledError):
        blocked()
    release(line.client, line.handoff_id)
    line.assert_nothing_remains()


def test_abort_reaches_the_reader(line: Line) -> None:
    writer, reader = line.send(upto=1), line.reader()
    writer.abort("engine_failed", "out of memory")
    assert isinstance(reader.read(5), Page)
    reader.imported()
    with pytest.raises(AbortedError, match="engine_failed: out of memory"):
        reader.read(5)


def test_reading_and_importing_take_turns(line: Line) -> None:
    line.send()
    reader = line.reader()
    with pytest.raises(RuntimeError):
        reader.imported()
    reader.read(5)
    with pytest.raises(RuntimeError):
        reader.read(5)


@pytest.mark.parametrize("handoff_id", ["x", "*", "a" * 33, "../" * 8 + "abcdefgh", "A" * 32])
def test_only_uuid_hex_becomes_a_key(line: Line, handoff_id: str) -> None:
    with pytest.raises(FrameError, match="handoff id"):
        release(line.client, handoff_id)
    with pytest.raises(FrameError, match="handoff id"):
        heartbeat(line.client, [handoff_id], line.settings)
    with pytest.raises(FrameError, match="handoff id"):
        raise_fence(line.client, handoff_id, Attempts(1, 1), line.settings)


# -- damage: each does one thing to a transfer of six pages at rest


def _payload(line: Line, sequence: int) -> str:
    return line.names.payload(str(line.attempts), sequence)


def _entries(line: Line) -> list[tuple[bytes, dict[bytes, bytes]]]:
    entries: Any = line.client.xrange(line.names.stream)
    return list(entries)


def _stored(line: Line, sequence: int) -> bytes:
    data: Any = line.client.get(_payload(line, sequence))
    return bytes(data)


def _rewrite(line: Line, headers: list[bytes]) -> None:
    """The same stream with other headers in it."""
    line.client.delete(line.names.stream)
    for sequence, header in enumerate(headers):
        line.client.xadd(line.names.stream, {"h": header}, id=entry_id(line.attempts, sequence))


def corrupt_payload(line: Line) -> None:
    key = _payload(line, 3)
    line.client.setrange(key, 77, bytes([_stored(line, 3)[77] ^ 1]))


def truncate_payload(line: Line) -> None:
    line.client.set(_payload(line, 3), _stored(line, 3)[:-1])


def lengthen_payload(line: Line) -> None:
    line.client.append(_payload(line, 3), b"\0" * 100_000)


def delete_payload(line: Line) -> None:
    line.client.delete(_payload(line, 3))


def swap_payloads(line: Line) -> None:
    line.client.mset({_payload(line, 2): _stored(line, 3), _payload(line, 3): _stored(line, 2)})


def corrupt_header(line: Line) -> None:
    headers = [fields[b"h"] for _, fields in _entries(line)]
    headers[3] = headers[3][:60] + bytes([headers[3][60] ^ 1]) + headers[3][61:]
    _rewrite(line, headers)


def drop_header(line: Line) -> None:
    line.client.xdel(line.names.stream, entry_id(line.attempts, 3))


def duplicate_header(line: Line) -> None:
    headers = [fields[b"h"] for _, fields in _entries(line)]
    _rewrite(line, headers[:4] + headers[3:])


def reorder_headers(line: Line) -> None:
    headers = [fields[b"h"] for _, fields in _entries(line)]
    headers[2], headers[3] = headers[3], headers[2]
    _rewrite(line, headers)


def foreign_header(line: Line) -> None:
    other = line.another()
    other.fence()
    other.send()
    headers = [fields[b"h"] for _, fields in _entries(line)]
    headers[3] = [fields[b"h"] for _, fields in _entries(other)][3]
    release(other.client, other.handoff_id)
    _rewrite(line, headers)


def strange_entry(line: Line) -> None:
    headers = [fields[b"h"] for _, fields in _entries(line)]
    _rewrite(line, headers[:3])
    line.client.xadd(line.names.stream, {"x": "y"}, id=entry_id(line.attempts, 3))


def huge_header(line: Line) -> None:
    headers = [fields[b"h"] for _, fields in _entries(line)]
    _rewrite(line, [*headers[:3], bytes(100_000)])


@pytest.mark.parametrize(
    ("damage", "error", "accepted"),
    [
        (corrupt_payload, FrameError, 2),
        (truncate_payload, FrameError, 2),
        (lengthen_payload, FrameError, 2),
        (delete_payload, PageMissingError, 2),
        (swap_payloads, FrameError, 1),
        (corrupt_header, FrameError, 2),
        (drop_header, FrameError, 2),
        (duplicate_header, FrameError, 3),
        (reorder_headers, FrameError, 1),
        (foreign_header, FrameError, 2),
        (strange_entry, FrameError, 2),
        (huge_header, FrameError, 2),
    ],
)
def test_damage_ends_the_transfer_and_leaves_nothing(
    line: Line, damage: Callable[[Line], None], error: type[CrossfillError], accepted: int
) -> None:
    line.send()
    damage(line)
    reader = line.reader()
    good: list[int] = []

    def read_on() -> None:
        while True:
            page = reader.read(5)
            assert isinstance(page, Page)
            np.testing.assert_array_equal(page.data, line.page(len(good)).data)  # never a wrong page
            reader.imported()
            good.append(page.index)

    with pytest.raises(error):
        read_on()
    assert len(good) == accepted
    release(line.client, line.handoff_id)
    line.assert_nothing_remains()


@pytest.mark.parametrize("times", [1, 2])
def test_a_damaged_payload_is_read_once_again(monkeypatch: pytest.MonkeyPatch, line: Line, times: int) -> None:
    """Damage on the way, not at rest, of what comes first and of what is read again."""
    line.send()
    left, reply_into = [times], Link.reply_into

    def damaged(link: Link, target: memoryview) -> memoryview | Exception:
        got = reply_into(link, target)
        if left[0] and isinstance(got, memoryview):
            left[0] -= 1
            got[11] ^= 4
        return got

    monkeypatch.setattr(Link, "reply_into", damaged)
    reader = line.reader()
    if times == 1:
        line.receive(reader)
    else:
        with pytest.raises(FrameError, match="digest of payload"):
            reader.read(5)


# -- a full server


def full(line: Line) -> None:
    line.client.config_set("maxmemory", "1mb")


def test_a_full_server_refuses_new_pages_and_lets_everything_end(line: Line) -> None:
    writer = line.writer(patience_s=0.1)
    writer.open()
    writer.write(line.page(0))
    writer.flush()
    full(line)
    writer.write(line.page(1))
    with pytest.raises(CapacityError, match="raise its maxmemory"):
        writer.flush()
    assert gauges(line.client).in_flight_bytes == PAGE_BYTES
    writer.abort("capacity", "full")
    heartbeat(line.client, [line.handoff_id], line.settings)
    reader = line.reader()
    assert isinstance(reader.read(5), Page)
    reader.imported()
    with pytest.raises(AbortedError):
        reader.read(5)
    raise_fence(line.client, line.handoff_id, Attempts(2, 1), line.settings)
    release(line.client, line.handoff_id)
    line.assert_nothing_remains()


def test_a_payload_refused_after_its_credit_gives_the_credit_back(line: Line) -> None:
    writer = line.writer(patience_s=0.1)
    writer.open()
    after_the_credit(writer, lambda: full(line))
    writer.write(line.page(0))
    with pytest.raises(CapacityError, match="budget_bytes"):
        writer.flush()
    assert gauges(line.client) == (0, 0, 0)
    release(line.client, line.handoff_id)
    line.assert_nothing_remains()


def test_a_server_that_has_room_again_is_used_again(line: Line) -> None:
    refused = []
    writer = line.writer()
    be_patient = writer._sender._be_patient

    def be_patient_and_heal(why: Exception | str) -> None:
        refused.append(why)
        if len(refused) == 3:
            line.client.config_set("maxmemory", 0)
        be_patient(why)

    writer._sender._be_patient = be_patient_and_heal  # type: ignore[method-assign]
    writer.open()
    writer.flush()
    full(line)
    writer.write(line.page(0))
    writer.flush()
    assert len(refused) >= 3
    assert gauges(line.client).in_flight_bytes == PAGE_BYTES


# -- lost replies


def eventually(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.005)


def lose(monkeypatch: pytest.MonkeyPatch, number: int, *, on: Link | None = None) -> list[int]:
    """The server executes, and the `number`-th line on this connection for payloads, or on any, never comes."""
    count, line = [0], Link._line

    def line_or_loss(link: Link) -> tuple[bytes, bytes]:
        count[0] += on in (None, link)
        if count[0] == number and on in (None, link):
            raise link._failed("the reply is lost")
        return line(link)

    monkeypatch.setattr(Link, "_line", line_or_loss)
    return count


@pytest.mark.parametrize("lost", range(1, 12))
def test_a_lost_reply_of_the_writer_changes_nothing(monkeypatch: pytest.MonkeyPatch, line: Line, lost: int) -> None:
    seen = lose(monkeypatch, lost)
    assert line.send().bytes_written == 6 * PAGE_BYTES
    assert seen[0] > lost
    assert line.client.xlen(line.names.stream) == 8
    assert gauges(line.client) == (6 * PAGE_BYTES, 0, 1)
    line.receive(line.reader())


@pytest.mark.parametrize("lost", [1, 2, 5, 20, 40, 43, 44, 45, 46, 47, 48])
def test_a_lost_reply_of_the_reader_changes_nothing(monkeypatch: pytest.MonkeyPatch, line: Line, lost: int) -> None:
    line.send()
    reader = line.reader()
    seen = lose(monkeypatch, lost, on=reader._receiver._credit.link)
    line.receive(reader)
    assert seen[0] > lost
    assert gauges(line.client) == (0, 0, 0)


@pytest.mark.parametrize("for_ever", [False, True])
def test_a_server_that_falls_silent_over_a_give_back_is_asked_again_and_then_blamed(
    monkeypatch: pytest.MonkeyPatch, line: Line, for_ever: bool
) -> None:
    line.send()
    credit, returns = line.reader()._receiver._credit, Returns()
    returns.put((1,))

    def silent(*_: Any) -> Any:
        credit.link.drop()
        raise SilentError("no byte moved")

    monkeypatch.setattr(credit.link, "reply", silent)
    if for_ever:
        monkeypatch.setattr(credit.link, "reply_into", silent)
    fetched = credit.fetch_all([(2, memoryview(bytearray(PAGE_BYTES)))], returns)
    if for_ever:
        with pytest.raises(BrokerError):
            next(fetched)
    else:
        assert bytes(next(fetched)) == line.page(1).data.tobytes()
    assert returns.take() == [1]
    credit.link.close()


def test_a_lost_reply_to_a_give_back_changes_nothing(monkeypatch: pytest.MonkeyPatch, line: Line) -> None:
    line.send()
    reader = line.reader()
    seen = lose(monkeypatch, 1, on=reader._credit.link)
    line.receive(reader)
    assert seen[0] > 1
    assert gauges(line.client) == (0, 0, 0)


def test_a_page_sent_again_after_its_import_leaves_no_payload(line: Line) -> None:
    credit = Credit(line.client, line.handoff_id, line.attempts, line.settings)
    assert credit.reserve(0, 4)
    page = Outgoing(0, b"header", b"page")
    assert credit.exchange([page], [], 4)[0] == (1, None)
    credit.give_back([0])
    assert credit.exchange([page], [], 4)[0] == (1, None)
    assert not line.client.exists(credit.payload_key(0))
    assert line.client.xlen(line.names.stream) == 0


@pytest.mark.parametrize("group_bytes", [1, 8, 1 << 20])
def test_what_of_a_group_is_there_and_what_is_not(
    monkeypatch: pytest.MonkeyPatch, line: Line, group_bytes: int
) -> None:
    """Page 3 has no credit: those before it count, those behind it may be sent again."""
    monkeypatch.setattr("pipeline.broker.credit.GROUP_BYTES", group_bytes)
    credit = Credit(line.client, line.handoff_id, line.attempts, line.settings)
    pages = [Outgoing(sequence, b"header %d" % sequence, b"page") for sequence in range(5)]
    for sequence in (0, 1, 2, 4):
        assert credit.reserve(sequence, 4)
    assert credit.exchange(pages, [], 4)[0] == (3, "missing")
    assert [line.client.exists(credit.payload_key(sequence)) for sequence in range(5)] == [1, 1, 1, 0, 1]
    assert [fields[b"h"] for _, fields in _entries(line)] == [b"header 0", b"header 1", b"header 2"]
    assert credit.reserve(3, 4)
    assert credit.exchange(pages[3:], [5], 4) == ((2, None), (1, None))
    assert [fields[b"h"] for _, fields in _entries(line)] == [b"header %d" % sequence for sequence in range(5)]
    assert gauges(line.client) == (24, 0, 1)


def test_a_stale_group_leaves_no_payload(line: Line) -> None:
    credit = Credit(line.client, line.handoff_id, line.attempts, line.settings)
    raise_fence(line.client, line.handoff_id, Attempts(2, 1), line.settings)
    with pytest.raises(StaleAttemptError):
        credit.exchange([Outgoing(sequence, b"header", b"page") for sequence in range(3)], [], 4)
    assert [line.client.exists(credit.payload_key(sequence)) for sequence in range(3)] == [0, 0, 0]


def test_the_refusal_of_a_payload_is_the_reason_why_its_header_is_not_there(
    monkeypatch: pytest.MonkeyPatch, line: Line
) -> None:
    credit = Credit(line.client, line.handoff_id, line.attempts, line.settings)
    frames = [Outgoing(0, b"open", b""), *(Outgoing(sequence, b"header", b"page") for sequence in (1, 2, 3))]
    full = OutOfMemoryError("full")
    monkeypatch.setattr(credit, "_run", lambda parts, count: ["OK", full, full, [2, b"missing"]])
    assert credit.exchange(frames, [], 4)[0] == (2, full)


@pytest.mark.parametrize(("group_pages", "returned"), [(100, [[1, 2, 3, 4, 5, 6]]), (2, [[1, 2], [3, 4], [5, 6]])])
def test_pages_that_are_ready_give_their_credit_back_together(
    monkeypatch: pytest.MonkeyPatch, line: Line, group_pages: int, returned: list[list[int]]
) -> None:
    line.send()
    reader = line.reader()
    reader._much = group_pages * PAGE_BYTES
    given, returning = [], reader._credit.returning

    def seen(sequences: Sequence[int]) -> bytes:
        given.append(list(sequences))
        return returning(sequences)

    monkeypatch.setattr(reader._credit, "returning", seen)
    reader.read(5)
    reader._thread.join(60)  # everything is ready
    reader.imported()
    while isinstance(reader.read(5), Page):
        reader.imported()
    assert given == returned
    assert gauges(line.client) == (0, 0, 0)


def test_credit_does_not_wait_for_a_page_that_is_not_there(line: Line) -> None:
    line.send(upto=1)
    reader = line.reader()
    reader.read(5)
    reader.imported()
    with pytest.raises(DeadlineError):
        reader.read(0)
    eventually(lambda: gauges(line.client) == (0, 0, 0))


def test_what_is_in_the_engine_is_given_back_on_the_way_to_the_next_pages(line: Line) -> None:
    line.send(upto=3)
    credit, returns = Credit(line.client, line.handoff_id, line.attempts, line.settings), Returns()
    returns.put((1, 2))
    places = [(3, memoryview(bytearray(PAGE_BYTES)))]
    assert [bytes(payload) for payload in credit.fetch_all(places, returns)] == [line.page(2).data.tobytes()]
    assert gauges(line.client) == (PAGE_BYTES, 0, 1)
    assert returns.take() == []
    assert [entry for entry, _ in credit.headers(entry_id(line.attempts, 0), 9, 1, [3])] == []
    assert gauges(line.client) == (0, 0, 0)
    credit.link.close()


@pytest.mark.parametrize("loss", ["connection", "scripts"])
def test_a_give_back_on_the_way_that_fails_is_still_to_be_given(
    monkeypatch: pytest.MonkeyPatch, line: Line, loss: str
) -> None:
    """The pages come all the same."""
    line.send(upto=3)
    credit, returns = Credit(line.client, line.handoff_id, line.attempts, line.settings), Returns()
    returns.put((1, 2))
    if loss == "connection":
        lose(monkeypatch, 1, on=credit.link)
    else:
        line.client.script_flush()
    places = [(3, memoryview(bytearray(PAGE_BYTES)))]
    assert [bytes(payload) for payload in credit.fetch_all(places, returns)] == [line.page(2).data.tobytes()]
    credit.give_back(returns.take())
    assert gauges(line.client) == (PAGE_BYTES, 0, 1)
    credit.link.close()


def test_a_header_without_its_payload_says_so(line: Line) -> None:
    credit = Credit(line.client, line.handoff_id, line.attempts, line.settings)
    assert credit.reserve(0, 4)
    args: list[Word] = ["1.1", 1000, entry_id(line.attempts, 0), b"h", 4, "1.1.0", 1]
    assert credit._run([credit._script("header", args)], 1) == [[0, b"missing"]]
    assert line.client.exists(line.names.stream) == 0


def test_an_unreachable_server_is_a_broker_error(line: Line) -> None:
    line.client = connect("redis://127.0.0.1:1/0")
    with pytest.raises(BrokerError):
        line.send()


# -- leases


def test_a_silent_handoff_is_reaped_whole(line: Line) -> None:
    line.payload_ttl_s = 0.05
    writer = line.send(upto=2)
    other = line.another(payload_ttl_s=30)
    other.fence()
    other.send(upto=1)
    time.sleep(0.1)
    assert reap(line.client) == [line.handoff_id]
    assert list(line.client.scan_iter(f"*{line.handoff_id}*")) == []
    assert gauges(line.client) == (PAGE_BYTES, 0, 1)
    writer.write(line.page(2))
    with pytest.raises(StaleAttemptError):
        writer.flush()
    release(other.client, other.handoff_id)
    line.assert_nothing_remains()


def test_a_heartbeat_keeps_credits_and_payloads(line: Line) -> None:
    line.payload_ttl_s = 60
    line.send(upto=2)
    line.payload_ttl_s = 3600
    assert heartbeat(line.client, [line.handoff_id, uuid.uuid4().hex], line.settings) == [True, False]
    assert line.client.pttl(_payload(line, 1)) > 3_000_000
    ends: Any = line.client.zscore(keys.BUDGET_LEASES, line.handoff_id)
    assert ends > 3_000_000 + 1000 * line.client.time()[0]
    assert heartbeat(line.client, [], line.settings) == []


def test_heartbeats_of_many_handoffs_take_no_more_round_trips(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Connection.send_packed_command

    def counted(self: Connection, command: Any, check_health: bool = True) -> None:
        sent.append(1)
        send(self, command, check_health)

    handoffs = [uuid.uuid4().hex for _ in range(64)]
    heartbeat(line.client, handoffs[:1], line.settings)  # connects, and loads the script
    monkeypatch.setattr(Connection, "send_packed_command", counted)
    heartbeat(line.client, handoffs[:1], line.settings)
    one = len(sent)
    heartbeat(line.client, handoffs, line.settings)
    assert len(sent) == 2 * one


def test_credits_that_expired_do_not_leak_from_the_total(line: Line) -> None:
    line.send(upto=2)
    line.client.delete(line.names.credits)
    release(line.client, line.handoff_id)
    assert gauges(line.client) == (0, 0, 0)
