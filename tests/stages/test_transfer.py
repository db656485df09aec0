"""A prompt's pages over several attempts of P, and an answer over several of D: nothing twice, nothing lost."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from pipeline.broker import keys
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.record import Accept
from pipeline.broker.registry import Registry, Replica
from pipeline.engines.base import Capabilities, FinishReason, TokenStep
from pipeline.errors import EngineError, HandoffCancelledError, NoReplicaError, QuarantinedError, StaleAttemptError
from pipeline.handoff import State
from pipeline.logprob import TokenLogprob
from pipeline.request import Request, resumed
from pipeline.settings import HandoffSettings
from tests.stages.conftest import Build
from tests.stages.fake import CONTRACT, FakeAdmission, pages, text
from tests.stages.stand import FINISHED, THREE, Outcome, Stand, eventually, failure, outcome, quiet, same

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
REPLACED = (StaleAttemptError, HandoffCancelledError)  # as its own check, or its engine's end, tells it first
IMPORT_ONLY = Capabilities(can_prefill=False, needs_first_token=True)


def _register(
    stand: Stand, name: str, role: str, engine: str = "fake", capabilities: Capabilities | None = None
) -> None:
    able = capabilities or Capabilities()
    replica = Replica(
        name, engine, role, "m", CONTRACT, 4, 1, able.can_prefill, able.needs_first_token, features=able.features
    )
    Registry(stand.client).register(replica, 600)


@pytest.fixture
def two(stand: Stand) -> Stand:
    """A stand in which another P and another D are to be had."""
    _register(stand, "p-0", "prefill")
    _register(stand, "d-0", "decode")
    return stand


def _admissions(stand: Stand) -> int:
    return sum(isinstance(work, FakeAdmission) for work in stand.d.works)


def _dispatched(stand: Stand, request: Request, attempt: int) -> None:
    eventually(lambda: stand.seen(request).attempt("prefill") == attempt, "an attempt of P")


def _again(stand: Stand, request: Request, attempt: int = 2) -> Future[Outcome]:
    """P's job of the attempt that was dispatched."""
    _dispatched(stand, request, attempt)
    stand.p.set(bad_page=None, ready_pages=4)
    return stand.prefill(request)


# -- another P


@pytest.mark.parametrize("page", [0, 2, 3])
def test_p_fails_and_another_sends_the_rest(two: Stand, page: int) -> None:
    request = two.open()
    two.p.set(ready_pages=page)
    p, d = two.begin(request)
    two.await_state(request, State.STREAMING if page else State.ACCEPTED)
    eventually(lambda: len(two.d.imported) == page, "the pages before")
    two.p.set(bad_page=page)
    assert isinstance(failure(p), EngineError)
    assert outcome(_again(two, request)) == {"outcome": "sent", "pages": 4 - page, "bytes": (4 - page) * 2048}
    assert outcome(d) == FINISHED
    assert same(two.d.imported, pages(request))
    assert two.seen(request).accept == Accept(2, 1, page)
    assert two.said(request) == list(text(request))
    assert (_admissions(two), two.seen(request).recomputed) == (1, None)
    assert (two.field(request, "resent"), two.field(request, "imported_tokens")) == ("1", "199")
    quiet(two, request)


def test_p_dies_and_is_fenced_when_it_comes_back(two: Stand) -> None:
    """The janitor takes it out of the handoff; what the zombie sends later does not count."""
    request = two.open()
    two.p.set(ready_pages=2)
    zombie, d = two.begin(request)
    eventually(lambda: len(two.d.imported) == 2, "two pages")
    two.ledger.leave(request.handoff_id, "prefill", 1, error=ErrorInfo.of(EngineError("its lease has ended")))
    again = _again(two, request)
    failure(zombie)  # it may even have sent everything before it was fenced: D does not read it
    assert outcome(again)["pages"] == 2
    assert outcome(d) == FINISHED
    assert same(two.d.imported, pages(request))
    quiet(two, request)


def test_only_ps_last_word_is_lost(two: Stand) -> None:
    """Every page is there and verified: nobody is asked again."""
    request = two.open(tokens=193)  # three whole pages
    two.d.set(imports=2)
    p, d = two.begin(request)
    eventually(lambda: len(two.d.imported) == 2, "two pages")
    outcome(p)
    stream_key = keys.HandoffKeys(request.handoff_id).stream
    newest: Any = two.client.xrevrange(stream_key, count=1)
    two.client.xdel(stream_key, newest[0][0])
    two.ledger.leave(request.handoff_id, "prefill", 1, error=ErrorInfo.of(EngineError("died")))
    two.d.set(imports=3)
    assert outcome(d) == FINISHED
    assert two.seen(request).attempt("prefill") == 1
    assert same(two.d.imported, pages(request))
    quiet(two, request)


def test_d_is_told_before_it_has_room(two: Stand) -> None:
    request = two.open()
    d = two.decode(request)
    two.await_state(request, State.ADMITTED)
    two.ledger.enter(request.handoff_id, "prefill", "p-0@0")
    two.ledger.leave(request.handoff_id, "prefill", 1, error=ErrorInfo.of(EngineError("died")))
    assert outcome(_again(two, request))["pages"] == 4
    assert outcome(d) == FINISHED
    quiet(two, request)


def test_the_first_token_comes_from_the_p_that_was_asked_again(stand: Stand) -> None:
    _register(stand, "p-0", "prefill")
    request = stand.open(first_token=True)
    stand.d.set(capabilities=IMPORT_ONLY)
    stand.p.set(bad_page=3)
    _, d = stand.begin(request)
    outcome(_again(stand, request))
    assert outcome(d) == FINISHED
    assert stand.said(request) == list(text(request))
    quiet(stand, request)


def test_when_every_retry_fails_the_policy_decides(build: Build) -> None:
    stand = build(d_limits=HandoffSettings(retries=1))
    _register(stand, "p-0", "prefill")
    request = stand.open()
    stand.p.set(bad_page=1)
    p, d = stand.begin(request)
    assert isinstance(failure(p), EngineError)
    _dispatched(stand, request, 2)
    assert isinstance(failure(stand.prefill(request)), EngineError)
    assert outcome(d) == FINISHED
    assert stand.seen(request).recomputed == "peer_aborted"
    assert stand.said(request) == list(text(request))
    quiet(stand, request)


def test_a_queue_that_nobody_serves_in_time_is_not_tried_again(build: Build) -> None:
    stand = build(d_limits=HandoffSettings(queue_s=0.3))
    _register(stand, "p-0", "prefill")
    _register(stand, "q-0", "prefill", engine="other")
    request = stand.open()
    d = stand.decode(request)
    _dispatched(stand, request, 2)
    assert stand.seen(request).route["prefill_engine"] == "other"
    assert outcome(d) == FINISHED  # nobody came there either: D computed it
    assert stand.seen(request).recomputed == "deadline_exceeded"
    quiet(stand, request)


def test_two_deaths_end_it_for_good(two: Stand) -> None:
    request = two.open()
    d = two.decode(request)
    for attempt in (1, 2):
        _dispatched(two, request, attempt)
        two.ledger.enter(request.handoff_id, "prefill", f"p-0@{attempt}")
        died, lost = ErrorInfo.of(EngineError("died")), {f"lost_prefill_{attempt}": f"p-0@{attempt}"}
        two.ledger.leave(request.handoff_id, "prefill", attempt, error=died, fields=lost)
    assert isinstance(failure(d), QuarantinedError)
    assert [entry.error and entry.error.code for entry in two.log(request)] == ["quarantined"]
    quiet(two, request)


# -- another D


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_another_d_goes_on_where_the_first_stopped(two: Stand, tokens: int) -> None:
    """Here it is the same replica: what counts is the attempt. The first one never learns it by itself."""
    request = two.open()
    two.d.set(tokens=tokens)
    _, zombie = two.begin(request)
    two.await_state(request, State.DECODING if tokens else State.COMMITTED)
    eventually(lambda: len(two.said(request)) == tokens, "its tokens")
    assert two.d_services.dispatch.take_over(request.handoff_id, 1, {"decode": "d-0@1"})
    said = two.said(request)
    goes_on = resumed(request, [said])
    p, d = two.begin(request)
    assert isinstance(failure(zombie), REPLACED)
    two.d.set(tokens=3)
    outcome(p)
    assert outcome(d) == {"outcome": "finished", "tokens": 3}
    assert two.said(request) == [*said, *text(goes_on)]
    assert same(two.d.imported, pages(goes_on))
    assert [entry.seq for entry in two.log(request)] == [0, 1, 2]
    assert two.state(request) is State.FINISHED
    quiet(two, request)


def test_of_several_samples_only_what_is_new_is_said(stand: Stand) -> None:
    """The first D said two tokens of sample 0 and all of sample 1. The next says both again, and that is not told."""
    _register(stand, "p-0", "prefill")
    _register(stand, "d-0", "decode", capabilities=Capabilities(features=frozenset({"n", "logprobs"})))
    request = stand.open(sampling=replace(THREE, n=2, logprobs=0))

    def step(token: int, finish: FinishReason | None = None, *, of: int) -> TokenStep:
        return TokenStep((token,), finish, of, (TokenLogprob(token, -1.0, ()),))

    first = [step(10, of=0), step(20, of=1), step(21, "stop", of=1), step(11, of=0)]
    stand.d.set(script=first, script_ends=False)
    _, zombie = stand.begin(request)
    eventually(lambda: stand.said(request) == [10, 20, 21, 11], "four tokens")
    stand.d_services.dispatch.take_over(request.handoff_id, 1, {})
    assert isinstance(failure(zombie), REPLACED)
    again = TokenStep((11, 12), None, 0, (TokenLogprob(11, -1.0, ()), TokenLogprob(12, -2.0, ())))
    stand.d.set(script=[*first[:3], again, step(13, "length", of=0)], script_ends=True)
    outcome(stand.begin(request)[1])
    assert stand.d.works[-1].request.again == ((10, 11), (20, 21))
    assert same(stand.d.imported, pages(request))  # of the prompt alone
    told = [(entry.seq, entry.sample, entry.token_ids, entry.finish, entry.more) for entry in stand.log(request)]
    assert told[2] == (2, 1, (21,), "stop", True)
    assert told[4:] == [(4, 0, (12,), None, False), (5, 0, (13,), "length", False)]
    assert stand.log(request)[4].logprobs == (TokenLogprob(12, -2.0, ()),)
    assert stand.state(request) is State.FINISHED
    quiet(stand, request)


def test_what_counts_as_cached_is_of_the_clients_prompt(two: Stand) -> None:
    request = two.open(tokens=65)
    two.d.set(tokens=2)
    _, zombie = two.begin(request)
    eventually(lambda: len(two.said(request)) == 2, "two tokens")
    two.d_services.dispatch.take_over(request.handoff_id, 1, {})
    assert isinstance(failure(zombie), REPLACED)
    two.d.set(tokens=3, held=2)
    outcome(two.begin(request)[1])
    assert two.log(request)[-1].held_tokens == 65
    quiet(two, request)


def test_a_zombie_d_that_gives_up_on_p_takes_nothing_from_the_one_after_it(two: Stand) -> None:
    request = two.open()
    two.p.set(ready_pages=1)
    p, zombie = two.begin(request)
    eventually(lambda: len(two.d.imported) == 1, "a page")
    two.d_services.dispatch.take_over(request.handoff_id, 1, {})
    assert isinstance(failure(zombie), REPLACED)
    assert isinstance(failure(p), StaleAttemptError)
    two.p.set(ready_pages=4)
    again, d = two.begin(request)
    outcome(again)
    assert outcome(d) == FINISHED
    assert two.said(request) == list(text(request))
    quiet(two, request)


def test_no_replica_is_left_at_all(stand: Stand) -> None:
    request = stand.open()
    with pytest.raises(NoReplicaError):
        stand.d_services.dispatch.take_over(request.handoff_id, 1, {})
    assert stand.seen(request).attempt("decode") == 1
