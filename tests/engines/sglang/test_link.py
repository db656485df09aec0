"""Link and Station: both ends of the connection in one process, with pages that a test can hold up."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.engines.sglang.link import SHAPE, Link
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.order import First
from pipeline.engines.sglang.plugin.station import Station
from pipeline.engines.sglang.ring import RUNS, run_pages
from pipeline.errors import EngineError
from pipeline.page import PageArray, PageShape
from tests.engines.flow import PATIENCE_S, Waiter, eventually

PAGE = PageShape(layers=2, kv_heads=3, head_dim=8)


class FakeTransfer:
    """Pages filled with their numbers go out; what comes in is kept. `gate` holds copies up."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.ended = False
        self.lost = threading.Event()
        self.incoming: dict[int, PageArray] = {}
        self.obeyed: list[Message] = []
        self.threads: set[str] = set()
        self.drawn: list[First] = []

    def read(self, page: int, pages: NDArray[np.float16]) -> bool:
        if not self._go(page):
            return False
        for at, data in enumerate(pages, page):
            data[...] = at
        return True

    def write(self, page: int, pages: NDArray[np.float16]) -> bool:
        if not self._go(page):
            return False
        self.incoming |= {at: data.copy() for at, data in enumerate(pages, page)}
        return True

    def _go(self, page: int) -> bool:
        self.began.set()
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(PATIENCE_S)
        if page == 99:
            raise RuntimeError("a fault of the device")
        return not self.ended

    def obey(self, message: Message) -> None:
        self.obeyed.append(message)

    def draw(self, first: First) -> None:
        self.drawn.append(first)

    def lose(self) -> None:
        self.lost.set()


class Ends:
    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.lost = threading.Event()
        self.link = Link(PAGE, self.heard.append, self.lost.set)
        self.station = Station(self.link.address, lambda: (120, 20))
        self.transfer = FakeTransfer()
        self.station.add(5, self.transfer)
        self.station.start()
        assert self.link.wait_attached(PATIENCE_S)

    def hang_up(self) -> None:
        """The plug-in's process ends."""
        self.station._peer.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.transfer.gate.set()
    made.link.close()
    assert made.transfer.lost.wait(PATIENCE_S)
    made.station._peer.close()


def test_the_station_learns_the_page_shape(ends: Ends) -> None:
    assert ends.station.shape == PAGE


def test_pages_go_out(ends: Ends) -> None:
    pages = [ends.link.copy_out(5, index) for index in (3, 4)]
    for page, index in zip(pages, (3, 4), strict=True):
        assert page is not None
        assert page.shape == (1, *PAGE.array)
        assert (page == index).all()  # a copy: the run was used again
    assert ends.transfer.threads == {"crossfill-station"}


def test_many_pages_move_with_one_message(ends: Ends) -> None:
    assert ends.link.batch == run_pages(PAGE) == 16
    pages = ends.link.copy_out(5, 20, 16)
    assert pages is not None
    assert [int(page.max()) for page in pages] == [int(page.min()) for page in pages] == list(range(20, 36))


def test_what_was_drawn_finds_its_transfer(ends: Ends) -> None:
    ends.station.draw(5, First((7, 8)))
    ends.station.draw(6, First((9,)))  # aborted meanwhile
    assert ends.transfer.drawn == [First((7, 8))]


def test_a_message_with_data_arrives_whole(ends: Ends) -> None:
    longest = Message(Kind.FIRST, 5, data=bytes(range(256)) * 16)
    ends.station.say(longest)
    ends.station.say(Message(Kind.READY, 5, 3))
    assert eventually(lambda: len(ends.heard) == 2)
    assert ends.heard == [longest, Message(Kind.READY, 5, 3)]


@pytest.mark.parametrize("count", [1, 3, 16])
def test_pages_come_in(ends: Ends, count: int) -> None:
    data = np.random.default_rng(1).standard_normal((count, *PAGE.array)).astype(np.float16)
    assert ends.link.copy_in(5, 7, data)
    assert list(ends.transfer.incoming) == list(range(7, 7 + count))
    assert all(np.array_equal(ends.transfer.incoming[7 + at], data[at]) for at in range(count))


def test_a_run_holds_fewer_pages_where_they_are_large() -> None:
    large, huge = PageShape(layers=32, kv_heads=8, head_dim=128), PageShape(layers=80, kv_heads=8, head_dim=128)
    assert [run_pages(shape) for shape in (large, huge)] == [2, 1]


def test_what_has_ended_is_refused(ends: Ends) -> None:
    assert ends.link.copy_out(6, 0) is None  # nobody's room
    assert not ends.link.copy_in(6, 0, PAGE.empty()[None])
    ends.transfer.ended = True
    assert ends.link.copy_out(5, 0) is None
    ends.transfer.ended = False
    ends.station.remove(5)
    assert ends.link.copy_out(5, 0) is None
    ends.station.add(5, ends.transfer)
    assert ends.link.copy_out(5, 0) is not None


def test_a_copy_that_fails_is_answered(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    assert ends.link.copy_out(5, 99) is None
    assert "page 99 of room 5" in caplog.text
    assert ends.link.copy_out(5, 1) is not None


def test_runs_are_the_backpressure_and_come_back(ends: Ends) -> None:
    ends.transfer.gate.clear()
    waiters = [Waiter(lambda: ends.link.copy_out(5, 2)) for _ in range(3 * RUNS)]
    assert eventually(lambda: len(ends.link._copies) == RUNS)
    ends.transfer.gate.set()
    for waiter in waiters:
        waiter.join()
        assert waiter.error is None
    assert sorted(ends.link._free.get() for _ in range(RUNS)) == list(range(RUNS))


def test_orders_reach_the_transfer_and_words_the_worker(ends: Ends) -> None:
    ends.link.say(Message(Kind.COMMIT, 5, value=17))
    ends.link.say(Message(Kind.RELEASE, 6))  # nobody's: ignored
    assert eventually(lambda: ends.transfer.obeyed == [Message(Kind.COMMIT, 5, value=17)])
    for message in (Message(Kind.FIRST, 5, value=3), Message(Kind.READY, 5, page=4)):
        ends.station.say(message)
    assert eventually(lambda: ends.heard == [Message(Kind.FIRST, 5, value=3), Message(Kind.READY, 5, page=4)])


def test_gauges(ends: Ends) -> None:
    assert ends.link.measure() == (120, 20)


def test_every_copy_fails_when_the_other_end_is_gone(ends: Ends) -> None:
    ends.transfer.gate.clear()
    waiting = [Waiter(lambda: ends.link.copy_out(5, 0)) for _ in range(2 * RUNS)]
    assert ends.transfer.began.wait(PATIENCE_S)
    ends.hang_up()
    for waiter in waiting:
        waiter.join()
        assert isinstance(waiter.error, EngineError)
    assert ends.lost.wait(PATIENCE_S)
    with pytest.raises(EngineError, match="gone"):
        ends.link.measure()
    with pytest.raises(EngineError, match="gone"):
        ends.link.say(Message(Kind.MEASURE))


def test_a_station_that_can_serve_no_more_hangs_up(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the worker waits for answers of a thread that has ended."""

    def broken(message: Message) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ends.transfer, "obey", broken)
    ends.link.say(Message(Kind.COMMIT, 5))
    assert ends.lost.wait(PATIENCE_S)
    assert ends.transfer.lost.wait(PATIENCE_S)
    assert "cannot serve any more" in caplog.text


def test_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: ours + 1)
    link = Link(PAGE, lambda _: None, lambda: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{link.address}")
        assert stranger.recv(100) == b""
    monkeypatch.setattr(os, "getuid", lambda: ours)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as friend:
        friend.connect(f"\0{link.address}")
        packet, fds, _, _ = socket.recv_fds(friend, 100, 1)
        assert packet == SHAPE.pack(2, 3, 8)
        os.close(fds[0])
    link.close()


def test_close_before_anybody_came() -> None:
    lost: list[Any] = []
    link = Link(PAGE, lambda _: None, lambda: lost.append(1))
    link.close()
    link.close()
    assert lost == [1]
    assert not link.wait_attached(0)
