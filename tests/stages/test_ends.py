"""A handoff that is to end: cancelled, stopped, taken over, or with the broker away, wherever P and D are just then."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from pipeline.broker import stream
from pipeline.errors import DeadlineError, EngineError, HandoffCancelledError, StaleAttemptError
from pipeline.handoff import State
from pipeline.request import Request
from tests.stages.conftest import Build
from tests.stages.fake import pages, text
from tests.stages.stand import FINISHED, LIMITS, Outcome, Stand, eventually, failure, outcome, quiet, same

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)


def _waiting_for_p(stand: Stand, request: Request) -> list[Future[Outcome]]:
    jobs = [stand.decode(request)]
    stand.await_state(request, State.ADMITTED)
    return jobs


def _waiting_for_room(stand: Stand, request: Request) -> list[Future[Outcome]]:
    stand.d.set(seats=0)
    jobs = list(stand.begin(request))
    eventually(lambda: stand.d.waiting == 1, "D waits for room")
    return jobs


def _waiting_for_a_page(stand: Stand, request: Request) -> list[Future[Outcome]]:
    stand.p.set(ready_pages=0)
    jobs = list(stand.begin(request))
    stand.await_state(request, State.ACCEPTED)
    return jobs


def _importing(stand: Stand, request: Request) -> list[Future[Outcome]]:
    stand.d.set(imports=1)
    jobs = list(stand.begin(request))
    stand.await_state(request, State.STREAMING)
    eventually(lambda: stream.gauges(stand.client).waiters == 1, "P waits for credit")
    return jobs


def _before_the_first_token(stand: Stand, request: Request) -> list[Future[Outcome]]:
    stand.d.set(tokens=0)
    jobs = list(stand.begin(request))
    stand.await_state(request, State.COMMITTED)
    outcome(jobs.pop(0))
    return jobs


def _in_the_midst_of_text(stand: Stand, request: Request) -> list[Future[Outcome]]:
    stand.d.set(tokens=1)
    jobs = list(stand.begin(request))
    stand.await_state(request, State.DECODING)
    outcome(jobs.pop(0))
    return jobs


PLACES = pytest.mark.parametrize(
    "place",
    [
        _waiting_for_p,
        _waiting_for_room,
        _waiting_for_a_page,
        _importing,
        _before_the_first_token,
        _in_the_midst_of_text,
    ],
)
Place = Callable[[Stand, Request], list[Future[Outcome]]]


@PLACES
@pytest.mark.parametrize("told", [True, False])
def test_a_cancel_ends_both_wherever_they_are(stand: Stand, place: Place, told: bool) -> None:
    request = stand.open()
    jobs = place(stand, request)
    stand.cancel(request, told=told)
    for job in jobs:
        assert isinstance(failure(job), HandoffCancelledError)
    assert stand.state(request) is State.CANCELLED
    last = stand.log(request)[-1]
    assert last.error is not None
    assert (last.error.code, last.error.http_status) == ("cancelled", 499)
    assert stand.p.live == []
    quiet(stand, request)


def test_a_cancel_heard_by_nobody_but_the_next_look(stand: Stand) -> None:
    """The server drops every subscriber, D is blocked inside its engine: the record tells it all the same."""
    request = stand.open()
    (job,) = _in_the_midst_of_text(stand, request)
    stand.client.client_kill_filter(_type="pubsub")
    stand.cancel(request)
    assert isinstance(failure(job), HandoffCancelledError)
    assert stand.state(request) is State.CANCELLED
    quiet(stand, request)


def test_cancel_before_anybody_began(stand: Stand) -> None:
    request = stand.open()
    assert stand.ledger.cancel(request.handoff_id, "client") is State.CANCELLED
    for job in stand.begin(request):
        with pytest.raises(HandoffCancelledError, match="is cancelled"):
            outcome(job)
    assert stand.p.works == stand.d.works == []
    assert stand.remains(request) == []


@pytest.mark.parametrize("told", [True, False])
def test_a_stop_string_is_a_finish(stand: Stand, told: bool) -> None:
    request = stand.open()
    (job,) = _in_the_midst_of_text(stand, request)
    if told:
        assert stand.ledger.stop(request.handoff_id) is True
    else:
        stand.write(request, "state", State.FINISHED)
    assert outcome(job) == {"outcome": "stopped"}
    assert stand.state(request) is State.FINISHED
    assert stand.said(request) == list(text(request)[:1])
    assert [entry.error for entry in stand.log(request)] == [None]
    quiet(stand, request)


def test_a_stop_string_that_d_meets_with_its_next_token(stand: Stand) -> None:
    request = stand.open()
    (job,) = _in_the_midst_of_text(stand, request)
    stand.write(request, "state", State.FINISHED)  # before the watch looks again, the next token is there
    stand.d.set(tokens=3)
    assert outcome(job) == {"outcome": "stopped"}
    assert stand.said(request) == list(text(request)[:1])
    quiet(stand, request)


def test_nobody_works_for_a_dead_api_process(stand: Stand) -> None:
    request = stand.open(owned=False)
    with pytest.raises(HandoffCancelledError, match="is gone"):
        outcome(stand.decode(request))
    assert stand.d.works == []
    assert stand.state(request) is State.CANCELLED
    quiet(stand, request)


def test_a_newer_attempt_of_d_takes_over_and_the_older_changes_nothing(stand: Stand) -> None:
    request = stand.open()
    _, older = _waiting_for_a_page(stand, request)
    assert stand.supersede(request, "decode", "d-0@2") == 2
    stand.p.set(ready_pages=4)
    # its own check, or its engine's end, tells it first
    assert isinstance(failure(older), StaleAttemptError | HandoffCancelledError)
    assert stand.d.live == []
    left = stand.seen(request)
    assert (left.worker("decode"), left.error("decode")) == ("d-0@2", None)
    assert left.state is State.ACCEPTED
    assert stand.log(request) == []


# -- the broker is away for a while


def test_a_failure_is_told_when_the_broker_is_back(stand: Stand) -> None:
    request = stand.open()
    (job,) = _in_the_midst_of_text(stand, request)
    stand.hop.cut()
    stand.d.set(decode_error=EngineError("D broke"))
    eventually(lambda: stand.hop.refused >= 6, "it insists")
    assert stand.state(request) is State.DECODING
    stand.hop.mend()
    assert isinstance(failure(job), EngineError)
    assert stand.state(request) is State.FAILED
    assert stand.field(request, "error") == "engine_failed"
    quiet(stand, request)


def test_a_finish_is_left_when_the_broker_is_back(stand: Stand) -> None:
    request = stand.open()
    stand.d.set(on_close=stand.hop.cut)
    (job,) = _in_the_midst_of_text(stand, request)
    stand.d.set(tokens=3)
    eventually(lambda: stand.hop.refused >= 6, "it insists")
    stand.hop.mend()
    assert outcome(job) == FINISHED
    quiet(stand, request)


@pytest.mark.parametrize("stopped", [True, False])
def test_the_broker_goes_away_right_after_a_cancel_or_a_stop(stand: Stand, stopped: bool) -> None:
    """What was cancelled never shows as failed, and a stop string stays a finish."""
    request = stand.open()
    (job,) = _in_the_midst_of_text(stand, request)
    stand.d.set(on_close=stand.hop.cut)
    if stopped:
        stand.ledger.stop(request.handoff_id)
    else:
        stand.cancel(request)
    eventually(lambda: stand.hop.refused >= 6, "it insists")
    stand.hop.mend()
    if stopped:
        assert outcome(job) == {"outcome": "stopped"}
    else:
        assert isinstance(failure(job), HandoffCancelledError)
    assert stand.state(request) is (State.FINISHED if stopped else State.CANCELLED)
    quiet(stand, request)


def test_a_pause_of_the_server_is_only_a_pause(stand: Stand) -> None:
    request = stand.open()
    jobs = _importing(stand, request)
    stand.client.client_pause(1500)
    stand.d.set(imports=4)
    assert outcome(jobs[0])["pages"] == 4
    assert outcome(jobs[1]) == FINISHED
    assert same(stand.d.imported, pages(request))
    quiet(stand, request)


# -- deadlines of D; those of its queue and of the whole are a janitor's: `tests/broker/test_janitor.py`

DEADLINES: dict[str, tuple[dict[str, float], dict[str, int], str]] = {
    "queue_s": ({"queue_s": 0.3}, {}, "waited 0.3 s for a prefill worker"),
    "accept_s": ({"accept_s": 0.3}, {"seats": 0}, "no room"),
    "progress_s": ({"progress_s": 0.3}, {}, "no page came in time: is the prefill worker alive?"),
}


@pytest.mark.parametrize("name", DEADLINES)
def test_each_deadline_ends_in_a_504_that_may_be_tried_again(build: Build, name: str) -> None:
    limits, gates, message = DEADLINES[name]
    stand = build(d_limits=LIMITS.model_copy(update={"failure_policy": "fail", **limits}))
    request = stand.open()
    stand.p.set(ready_pages=1)
    stand.d.set(**gates)
    job = stand.decode(request) if name == "queue_s" else stand.begin(request)[1]
    assert isinstance(failure(job), DeadlineError)
    (entry,) = stand.log(request)
    assert entry.error is not None
    assert (entry.error.code, entry.error.http_status, entry.error.retryable) == ("deadline_exceeded", 504, True)
    assert entry.error.message == message
    quiet(stand, request)
