"""What the engines that copy on job threads share, against naive twins."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contract import Contract
from pipeline.engines.ticket import Ticket, Unread, admitted, require_fit, require_next
from pipeline.errors import DeadlineError, EngineError, HandoffCancelledError
from pipeline.page import Page
from pipeline.request import Request, Sampling

CONTRACT = Contract("w", "t", "c", layers=1, kv_heads=1, head_dim=2, vocab_size=100, context_length=512)


def request(tokens: int) -> Request:
    return Request("0" * 32, (1,) * tokens, Sampling(max_tokens=1))


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 14)), max_size=30))
def test_unread_is_the_set_of_pages_neither_read_nor_skipped(pages: int, moves: list[tuple[bool, int]]) -> None:
    unread, twin = Unread(pages), set(range(pages))
    for reads, index in moves:
        if reads and index < pages:
            if index in twin:
                unread.require(index)
                unread.read(index)
            else:
                with pytest.raises(EngineError, match="read or skipped already"):
                    unread.require(index)
            twin.discard(index)
        elif not reads:
            unread.skip_to(index)
            twin -= set(range(index))
        assert unread.count == len(twin)
        assert unread.first == min(twin, default=pages)


def test_a_page_that_the_prompt_has_not_is_named() -> None:
    for index in (-1, 3):
        with pytest.raises(EngineError, match=f"no page {index}: the prompt has 3"):
            Unread(3).require_page(index)


def test_pages_are_imported_in_order_with_their_own_tokens() -> None:
    asked = request(131)  # 130 tokens to transfer: pages of 64, 64, 2
    data = np.zeros((1, 2, 1, 64, 2), np.float16)
    require_next(Page(2, 2, data), 2, 3, asked)
    for page, wanted in ((Page(1, 64, data), 0), (Page(0, 64, data), 1), (Page(3, 1, data), 3)):
        with pytest.raises(EngineError, match="cannot be imported"):
            require_next(page, wanted, 3, asked)
    with pytest.raises(EngineError, match="has 64 tokens, expected 2"):
        require_next(Page(2, 64, data), 2, 3, asked)


@pytest.mark.parametrize(("limit", "setting"), [(512, "context_length"), (128, "kv_cache_bytes")])
def test_what_can_never_fit_names_the_setting(limit: int, setting: str) -> None:
    require_fit(request(limit - 1), limit, CONTRACT)
    with pytest.raises(EngineError, match=f"{setting} allows {limit - 1}"):
        require_fit(request(limit), limit, CONTRACT)


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(EngineError, match="vocabulary of 100"):
        require_fit(Request("0" * 32, (1, 100), Sampling(max_tokens=1)), 512, CONTRACT)


class Asking:
    def __init__(self, answers: list[bool]) -> None:
        self.request = request(7)
        self.answers = answers
        self.closed = False

    def wait_admitted(self, timeout_s: float) -> bool:
        return self.answers.pop(0)

    def close(self) -> None:
        self.closed = True


def test_a_ticket_with_room_is_handed_out_open() -> None:
    asking = Asking([False, True])
    assert admitted(asking, 60, lambda: None, "X") is asking
    assert not asking.closed


def test_a_ticket_without_room_is_closed() -> None:
    asking = Asking([False])
    with pytest.raises(DeadlineError, match=r"X had no room for 7 prompt tokens within 0 s"):
        admitted(asking, 0, lambda: None, "X")
    assert asking.closed


def test_a_check_that_raises_closes_the_ticket() -> None:
    def gone() -> None:
        raise HandoffCancelledError("gone")

    asking = Asking([False, False])
    with pytest.raises(HandoffCancelledError, match="gone"):
        admitted(asking, 60, gone, "X")
    assert asking.closed


class Open(Ticket):
    def wait(self) -> None:
        with self.changed:
            self._wait(lambda: False)


def test_a_failure_wakes_whoever_waits_and_the_first_one_stays() -> None:
    ticket, seen = Open(request(2)), []

    def wait() -> None:
        try:
            ticket.wait()
        except EngineError as error:
            seen.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    ticket.fail(EngineError("first"))
    ticket.fail(EngineError("second"))
    waiting.join()
    with pytest.raises(EngineError, match="first"):
        ticket.wait()
    assert seen == ["first"]


def test_draining_waits_for_a_running_copy_and_ends_waiting_calls() -> None:
    ticket = Open(request(2))
    ticket._copying = 1
    draining = threading.Thread(target=ticket._drain)
    draining.start()
    with pytest.raises(HandoffCancelledError):
        ticket.wait()
    assert draining.is_alive()
    ticket._end_copy()
    draining.join()
    assert ticket.closed


def test_what_a_copy_took_along_waits_until_it_is_taken_or_passed_over() -> None:
    unread = Unread(6)
    pages = [np.full((1, 2, 1, 64, 1), index, dtype=np.float16) for index in range(6)]
    unread.keep(1, pages[1:5])
    assert unread.copied == [1, 2, 3, 4]
    assert unread.take(0) is None
    assert unread.take(2) is pages[2]
    assert unread.take(2) is None
    unread.skip_to(4)
    assert unread.copied == [4]
    with pytest.raises(EngineError, match="page 3 was read or skipped already"):
        unread.take(3)
    unread.drop()
    assert unread.copied == []
