"""P's half: nothing before accept, exactly the pages that are wanted, and how it ends when something goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from pipeline import header
from pipeline.broker import keys, stream
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.record import Accept
from pipeline.errors import DeadlineError, EngineError, HandoffCancelledError, StaleAttemptError
from pipeline.handoff import Attempts, Event, State
from pipeline.header import Kind
from pipeline.request import Request
from pipeline.settings import HandoffSettings
from tests.stages.conftest import Build
from tests.stages.fake import PAGE_BYTES, pages, text
from tests.stages.stand import Outcome, Stand, eventually, failure, outcome, same

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)


def _accept(stand: Stand, request: Request, first_page: int = 0) -> int:
    """D's word to P's present attempt, given by hand; returns D's attempt."""
    attempt, record = stand.ledger.enter(request.handoff_id, "decode", "d-0@9")
    pair = Attempts(record.number("prefill_attempt"), attempt)
    stream.raise_fence(stand.client, request.handoff_id, pair, stand.settings.broker)
    stand.ledger.accept(request.handoff_id, Accept(pair.prefill, pair.decode, first_page), {})
    return attempt


def _headers(stand: Stand, request: Request) -> list[header.Header]:
    entries: Any = stand.client.xrange(keys.HandoffKeys(request.handoff_id).stream)
    return [header.decode(fields[b"h"]) for _, fields in entries]


def _working(stand: Stand, count: int = 1) -> None:
    eventually(lambda: len(stand.p.live) == count, "P at work")


@pytest.mark.parametrize("tokens", [2, 65, 66, 200, 257])
def test_every_page_crosses_unchanged(stand: Stand, tokens: int) -> None:
    request = stand.open(tokens)
    p, d = stand.begin(request)
    count = -(-(tokens - 1) // 64)
    assert outcome(p) == {"outcome": "sent", "pages": count, "bytes": count * PAGE_BYTES}
    outcome(d)
    assert same(stand.d.imported, pages(request))
    assert (stand.field(request, "pages"), stand.field(request, "bytes")) == (str(count), str(count * PAGE_BYTES))
    assert stand.remains(request) == []


@pytest.mark.parametrize("held", [1, 3])
def test_pages_that_d_holds_are_not_sent(stand: Stand, held: int) -> None:
    request, sent = stand.open(), 4 - held
    stand.d.set(held=held)
    p, d = stand.begin(request)
    assert outcome(p) == {"outcome": "sent", "pages": sent, "bytes": sent * PAGE_BYTES}
    outcome(d)
    assert same(stand.d.imported, pages(request)[held:])
    assert stand.said(request) == list(text(request))
    assert stand.remains(request) == []


@pytest.mark.parametrize("further", [(), (Event.COMMIT,)])
def test_nothing_is_sent_when_d_holds_all_of_it(stand: Stand, further: tuple[Event, ...]) -> None:
    """Nor is that a failure of P, even if D was so quick that P reads its accept after the commit."""
    request = stand.open()

    def answer() -> None:
        attempt = _accept(stand, request, first_page=4)
        for event in further:
            stand.ledger.advance(request.handoff_id, "decode", attempt, event)

    stand.p.set(on_prefill=answer)
    assert outcome(stand.prefill(request)) == {"outcome": "held", "pages": 0}
    assert stand.client.exists(keys.HandoffKeys(request.handoff_id).stream) == 0
    assert stand.p.live == []


def test_marks_are_in_the_order_of_the_story(stand: Stand) -> None:
    request = stand.open()
    for job in stand.begin(request):
        outcome(job)
    trace = stand.ledger.trace(request.handoff_id)
    assert trace is not None
    for story in (
        ["created", "prefill_started", "first_page_out", "last_page_out"],
        ["created", "decode_started", "admitted", "accepted", "first_page_in", "last_page_in", "committed", "finished"],
    ):
        assert [mark for mark in trace["marks_ms"] if mark in story] == story


def test_computing_begins_at_once_and_nothing_is_written_before_accept(stand: Stand) -> None:
    request = stand.open()
    job = stand.prefill(request)
    _working(stand)
    assert stand.state(request) is State.ADMITTED
    names = keys.HandoffKeys(request.handoff_id)
    assert stand.client.exists(names.stream, names.credits) == 0
    _accept(stand, request, first_page=3)
    assert outcome(job) == {"outcome": "sent", "pages": 1, "bytes": PAGE_BYTES}
    assert [(frame.kind, frame.index) for frame in _headers(stand, request)] == [
        (Kind.OPEN, 0),
        (Kind.PAGE, 3),
        (Kind.COMMIT, 1),
    ]


def test_no_accept_in_time(build: Build) -> None:
    stand = build(p_limits=HandoffSettings(accept_s=0.3))
    request = stand.open()
    assert isinstance(failure(stand.prefill(request)), DeadlineError)
    left = stand.seen(request)
    assert (left.state, left.worker("prefill")) == (State.ADMITTED, None)
    error = left.error("prefill")
    assert error is not None
    assert (error.code, error.message) == ("deadline_exceeded", "waited 0.3 s for accept")
    assert stand.p.live == []


def test_a_failing_engine_is_told_to_d_in_the_stream(stand: Stand) -> None:
    request = stand.open()
    stand.p.set(bad_page=1)
    job = stand.prefill(request)
    _working(stand)
    _accept(stand, request)
    assert isinstance(failure(job), EngineError)
    *_, last = _headers(stand, request)
    assert (last.kind, json.loads(last.body)) == (Kind.ABORT, {"code": "engine_failed", "message": "page 1 is bad"})
    error = stand.seen(request).error("prefill")
    assert error is not None
    assert (error.code, error.message, error.retryable) == ("engine_failed", "page 1 is bad", True)
    assert stand.p.live == []


def test_a_page_that_never_gets_ready(build: Build) -> None:
    stand = build(p_limits=HandoffSettings(progress_s=0.3))
    request = stand.open()
    stand.p.set(ready_pages=1)
    job = stand.prefill(request)
    _working(stand)
    _accept(stand, request)
    with pytest.raises(DeadlineError, match=r"page 1 was not computed within 0\.3 s"):
        outcome(job)
    assert [frame.kind for frame in _headers(stand, request)] == [Kind.OPEN, Kind.PAGE, Kind.ABORT]


@pytest.mark.parametrize("held", [0, 2])
def test_commit_waits_for_the_first_token(stand: Stand, held: int) -> None:
    """Also where D holds every page."""
    request = stand.open(128, first_token=True)
    stand.p.set(drawn=False)
    job = stand.prefill(request)
    _working(stand)
    _accept(stand, request, first_page=held)
    kinds = [Kind.OPEN] + [Kind.PAGE] * (2 - held)
    eventually(lambda: [frame.kind for frame in _headers(stand, request)] == kinds, "every page sent")
    stand.p.set(drawn=True)
    assert outcome(job) == {"outcome": "sent", "pages": 2 - held, "bytes": (2 - held) * PAGE_BYTES}
    *_, last = _headers(stand, request)
    assert (last.kind, int.from_bytes(last.body, "little")) == (Kind.COMMIT, text(request)[0])


def _at_accept(stand: Stand, request: Request) -> None:
    _working(stand)


def _at_page(stand: Stand, request: Request) -> None:
    stand.p.set(ready_pages=1)
    _working(stand)
    _accept(stand, request)
    eventually(lambda: len(_headers(stand, request)) == 2, "the first page")


def _at_credit(stand: Stand, request: Request) -> None:
    _working(stand)
    _accept(stand, request)
    eventually(lambda: stream.gauges(stand.client).waiters == 1, "a writer without credit")


def _at_first_token(stand: Stand, request: Request) -> None:
    stand.p.set(drawn=False)
    _working(stand)
    _accept(stand, request, first_page=4)
    eventually(lambda: len(_headers(stand, request)) == 1, "the transfer opened")


WAITS = pytest.mark.parametrize("wait", [_at_accept, _at_page, _at_credit, _at_first_token])
Wait = Callable[[Stand, Request], None]


def _started(stand: Stand, wait: Wait) -> tuple[Request, Future[Outcome]]:
    """P, blocked where `wait` says; all deadlines are far away."""
    request = stand.open(first_token=wait is _at_first_token)
    job = stand.prefill(request)
    wait(stand, request)
    return request, job


@WAITS
@pytest.mark.parametrize("told", [True, False])
def test_a_cancel_ends_it_wherever_it_waits(stand: Stand, wait: Wait, told: bool) -> None:
    request, job = _started(stand, wait)
    stand.cancel(request, told=told)
    assert isinstance(failure(job), HandoffCancelledError)
    assert stand.p.live == []
    if wait is not _at_accept:
        assert stand.state(request) is State.DRAINING  # the other worker is still in
        stand.ledger.leave(request.handoff_id, "decode", 1)
    assert stand.state(request) is State.CANCELLED
    assert [entry.error and entry.error.code for entry in stand.log(request)] == ["cancelled"]
    assert stand.remains(request) == []


@WAITS
@pytest.mark.parametrize("told", [True, False])
def test_it_leaves_as_soon_as_d_computes_the_prompt_itself(stand: Stand, wait: Wait, told: bool) -> None:
    request, job = _started(stand, wait)
    attempt = stand.seen(request).attempt("decode")
    if told:
        stand.ledger.mark(request.handoff_id, "decode", attempt, {"recomputed": "x"}, publish="recompute")
    else:
        stand.write(request, "recomputed", "x")
    assert isinstance(failure(job), StaleAttemptError)
    assert stand.p.live == []
    left = stand.seen(request)
    assert (left.worker("prefill"), left.error("prefill")) == (None, None)
    assert left.state in (State.ADMITTED, State.ACCEPTED)


@WAITS
def test_it_leaves_when_d_has_failed(stand: Stand, wait: Wait) -> None:
    request, job = _started(stand, wait)
    attempt = stand.seen(request).number("decode_attempt")
    stand.ledger.fail(request.handoff_id, ErrorInfo.of(EngineError("D broke")))
    if attempt:
        stand.ledger.leave(request.handoff_id, "decode", attempt)
    assert isinstance(failure(job), HandoffCancelledError)
    assert stand.p.live == []
    assert stand.state(request) is State.FAILED
    assert stand.remains(request) == []


def test_an_older_attempt_changes_nothing_of_the_newer(stand: Stand) -> None:
    request = stand.open()
    older = stand.prefill(request)
    _working(stand)
    stand.supersede(request, "prefill")
    newer = stand.prefill(request)
    eventually(lambda: len(stand.p.works) == 2, "P at work again")
    outcome(stand.decode(request))
    assert outcome(newer)["pages"] == 4
    assert isinstance(failure(older), StaleAttemptError | HandoffCancelledError)
    assert same(stand.d.imported, pages(request))
    assert stand.seen(request).accept == Accept(2, 1, 0)
    assert stand.remains(request) == []


def test_nobody_works_for_a_dead_api_process(stand: Stand) -> None:
    request = stand.open(owned=False)
    with pytest.raises(HandoffCancelledError, match=r"the API process that owns handoff .* is gone"):
        outcome(stand.prefill(request))
    assert stand.p.works == []
    assert stand.state(request) is State.CANCELLED
    assert stand.field(request, "reason") == "owner-gone"
    assert stand.remains(request) == []


@pytest.mark.parametrize("state", [State.CANCELLED, State.FAILED, State.FINISHED, State.COMMITTED, State.DECODING])
def test_a_job_that_comes_too_late_starts_nothing(stand: Stand, state: State) -> None:
    request = stand.open()
    stand.write(request, "state", state)
    with pytest.raises(HandoffCancelledError, match=f"is {state}"):
        outcome(stand.prefill(request))
    assert stand.p.works == []
    assert not stand.seen(request).begun("prefill")


def test_a_handoff_nobody_knows(stand: Stand) -> None:
    request = stand.open()
    stand.client.flushall()
    with pytest.raises(HandoffCancelledError, match="is gone"):
        outcome(stand.prefill(request))
    assert stand.p.works == []


def test_the_broker_is_away_when_p_wants_to_leave(stand: Stand) -> None:
    request = stand.open()
    stand.p.set(on_close=stand.hop.cut)
    job = stand.prefill(request)
    _working(stand)
    _accept(stand, request, first_page=3)
    eventually(lambda: stand.hop.refused >= 4, "it insists")
    assert stand.seen(request).worker("prefill") == "p-0@1"
    stand.hop.mend()
    assert outcome(job) == {"outcome": "sent", "pages": 1, "bytes": PAGE_BYTES}
    assert stand.seen(request).worker("prefill") is None


def test_the_broker_is_away_when_p_has_failed(stand: Stand) -> None:
    request = stand.open()
    stand.p.set(bad_page=0, on_close=stand.hop.cut)
    job = stand.prefill(request)
    _working(stand)
    _accept(stand, request)
    eventually(lambda: stand.hop.refused >= 4, "it insists")
    stand.hop.mend()
    assert isinstance(failure(job), EngineError)
    error = stand.seen(request).error("prefill")
    assert error is not None
    assert error.code == "engine_failed"
