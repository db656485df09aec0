"""D's half: what it imports and says, what it does when P fails it, and that it always lets go of its engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from pipeline.broker import keys, scripts, stream
from pipeline.broker.channel import TokenEntry
from pipeline.broker.payload import Link
from pipeline.engines.base import Capabilities, TokenStep
from pipeline.errors import (
    BrokerError,
    CrossfillError,
    DeadlineError,
    EngineError,
    FrameError,
    HandoffCancelledError,
    NoReplicaError,
    PeerError,
    StaleAttemptError,
)
from pipeline.frame import AbortedError
from pipeline.handoff import State
from pipeline.logprob import TokenLogprob
from pipeline.request import Request, Sampling
from pipeline.settings import HandoffSettings
from pipeline.stages import decode
from tests.stages.conftest import Build
from tests.stages.fake import FakeAdmission, pages, text
from tests.stages.stand import FINISHED, LIMITS, Outcome, Stand, eventually, failure, outcome, quiet, same

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
FAIL = LIMITS.model_copy(update={"failure_policy": "fail"})
IMPORT_ONLY = Capabilities(can_prefill=False, needs_first_token=True)  # like SGLang in decode mode


def _raise(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def _local(stand: Stand) -> list[bool]:
    """Of every admission so far: was it for a prompt computed by D itself?"""
    return [work.local for work in stand.d.works if isinstance(work, FakeAdmission)]


# -- nothing goes wrong but a reply


@pytest.mark.parametrize("token", [0, 1, 2])
def test_a_lost_reply_of_an_emit_neither_loses_nor_doubles_a_token(stand: Stand, token: int) -> None:
    """The last entry is the end too: it is told once, and D knows that it is."""
    request = stand.open()
    stand.d.set(tokens=token)
    _, job = stand.begin(request)
    stand.await_state(request, State.DECODING if token else State.COMMITTED)
    eventually(lambda: len(stand.said(request)) == token, "the tokens before")
    stand.hop.lose(stand.client.script_load(scripts.source("emit")).encode())
    stand.d.set(tokens=3)
    assert outcome(job) == FINISHED
    assert stand.hop.lost == 1
    assert stand.said(request) == list(text(request))
    assert [(entry.seq, entry.finish) for entry in stand.log(request)] == [(0, None), (1, None), (2, "length")]
    quiet(stand, request)


def test_d_gives_up_on_a_broker_that_stays_away(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "EMIT_S", 0.0)
    request = stand.open()
    stand.d.set(tokens=1)
    _, job = stand.begin(request)
    eventually(lambda: len(stand.said(request)) == 1, "a token")
    stand.hop.lose(stand.client.script_load(scripts.source("emit")).encode(), times=2)
    stand.d.set(tokens=3)
    assert isinstance(failure(job), BrokerError)
    assert stand.state(request) is State.FAILED
    assert stand.said(request) == list(text(request)[:2])
    quiet(stand, request)


# -- nothing goes wrong


def test_a_handoff_from_end_to_end(stand: Stand) -> None:
    request = stand.open()
    _, job = stand.begin(request)
    assert outcome(job) == FINISHED
    assert stand.said(request) == list(text(request))
    assert [(entry.seq, entry.finish, entry.held_tokens) for entry in stand.log(request)] == [
        (0, None, None),
        (1, None, None),
        (2, "length", 0),
    ]
    assert (stand.field(request, "imported_tokens"), stand.field(request, "reused_tokens")) == ("199", "0")
    assert stand.state(request) is State.FINISHED
    assert _local(stand) == [False]
    quiet(stand, request)


@pytest.mark.parametrize(("held", "reused", "imported"), [(1, "64", "135"), (3, "192", "7"), (4, "199", "0")])
def test_what_d_held_is_counted(stand: Stand, held: int, reused: str, imported: str) -> None:
    request = stand.open()
    stand.d.set(held=held)
    _, job = stand.begin(request)
    assert outcome(job) == FINISHED
    assert (stand.field(request, "reused_tokens"), stand.field(request, "imported_tokens")) == (reused, imported)
    assert stand.log(request)[-1].held_tokens == int(reused)
    quiet(stand, request)


def test_a_local_route_needs_no_p(stand: Stand) -> None:
    request = stand.open(local=True)
    assert outcome(stand.decode(request)) == FINISHED
    assert stand.said(request) == list(text(request))
    assert _local(stand) == [True]
    assert stand.field(request, "imported_tokens") == "0"
    quiet(stand, request)


def test_d_admits_nothing_before_p_has_begun(stand: Stand) -> None:
    request = stand.open()
    job = stand.decode(request)
    stand.await_state(request, State.ADMITTED)
    time.sleep(0.1)
    assert stand.d.works == []
    outcome(stand.prefill(request))
    assert outcome(job) == FINISHED


@pytest.mark.parametrize("held", [0, 4])
def test_the_first_token_is_ps(stand: Stand, held: int) -> None:
    request = stand.open(first_token=True)
    stand.d.set(capabilities=IMPORT_ONLY, held=held)
    _, job = stand.begin(request)
    assert outcome(job) == FINISHED
    assert stand.said(request) == list(text(request))
    assert same(stand.d.imported, pages(request)[held:])
    quiet(stand, request)


# -- P fails


def _recomputed(stand: Stand, request: Request, job: Future[Outcome], why: str) -> None:
    """D came to the same text without P."""
    assert outcome(job) == FINISHED
    assert stand.said(request) == list(text(request))
    assert stand.seen(request).recomputed == why
    assert _local(stand)[-1] is True
    quiet(stand, request)


def test_p_fails_before_accept(stand: Stand) -> None:
    request = stand.open()
    stand.p.set(failure=EngineError("P broke"), on_prefill=_raise(EngineError("P broke")))
    p, d = stand.begin(request)
    assert isinstance(failure(p), EngineError)
    _recomputed(stand, request, d, "peer_error")


@pytest.mark.parametrize("page", [0, 2])
def test_p_fails_after_some_pages(stand: Stand, page: int) -> None:
    request = stand.open()
    stand.p.set(bad_page=page)
    p, d = stand.begin(request)
    assert isinstance(failure(p), EngineError)
    _recomputed(stand, request, d, "peer_aborted")


def test_p_falls_silent_and_leaves_as_soon_as_d_gives_up(build: Build) -> None:
    stand = build(d_limits=HandoffSettings(progress_s=0.4))  # P's own patience is 30 s
    request = stand.open()
    stand.p.set(ready_pages=2)
    stand.d.set(tokens=0)
    p, d = stand.begin(request)
    assert isinstance(failure(p), StaleAttemptError)
    assert stand.p.live == []
    stand.d.set(tokens=3)
    _recomputed(stand, request, d, "deadline_exceeded")


def test_no_p_at_all_and_one_that_comes_too_late(build: Build) -> None:
    stand = build(d_limits=HandoffSettings(queue_s=0.2))
    request = stand.open()
    stand.d.set(seats=0)
    d = stand.decode(request)
    eventually(lambda: stand.seen(request).recomputed, "D gives up")
    assert isinstance(failure(stand.prefill(request)), StaleAttemptError)
    assert stand.p.live == []
    stand.d.set(seats=1)
    assert outcome(d) == FINISHED
    assert stand.seen(request).recomputed == "deadline_exceeded"
    quiet(stand, request)


def test_a_busy_d_recomputes_when_it_has_room_again(stand: Stand) -> None:
    """P's error stays in the record all the while: it must not end the wait for the local admission."""
    request = stand.open()
    stand.p.set(bad_page=1)
    stand.d.set(seats=1, on_close=lambda: stand.d.set(seats=0))  # somebody else takes the seat
    p, d = stand.begin(request)
    assert isinstance(failure(p), EngineError)
    eventually(lambda: stand.seen(request).recomputed and stand.d.waiting == 1, "D waits for room")
    time.sleep(1.2)  # two looks of its watch
    assert stand.d.waiting == 1
    stand.d.set(seats=1)
    _recomputed(stand, request, d, "peer_aborted")


def test_p_fails_after_commit(stand: Stand) -> None:
    """D has everything it needs, though it reads it later."""
    request = stand.open()
    stand.p.set(close_error=EngineError("P broke while closing"))
    stand.d.set(imports=2)
    p, d = stand.begin(request)
    eventually(lambda: len(stand.d.imported) == 2, "two pages")
    stand.d.set(imports=3)
    assert isinstance(failure(p), EngineError)
    error = stand.seen(request).error("prefill")
    assert error is not None
    assert error.message == "P broke while closing"
    time.sleep(0.6)
    stand.d.set(imports=4)
    assert outcome(d) == FINISHED
    assert same(stand.d.imported, pages(request))
    assert stand.seen(request).recomputed is None
    assert _local(stand) == [False]
    stand.p.set(close_error=None)
    quiet(stand, request)


@pytest.mark.parametrize(("page", "error"), [(None, PeerError), (1, AbortedError)])
def test_the_policy_may_be_to_fail(build: Build, page: int | None, error: type[CrossfillError]) -> None:
    stand = build(d_limits=FAIL)
    request = stand.open()
    stand.p.set(bad_page=page, **({} if page else {"on_prefill": _raise(EngineError("P broke"))}))
    _, d = stand.begin(request)
    raised = failure(d)
    assert isinstance(raised, error)
    assert stand.state(request) is State.FAILED
    (last,) = stand.log(request)
    assert last.error is not None
    assert (last.error.code, last.error.message) == (error.code, str(raised))
    assert True not in _local(stand)
    quiet(stand, request)


def test_d_that_cannot_prefill_cannot_recompute(stand: Stand) -> None:
    request = stand.open(first_token=True)
    stand.p.set(bad_page=1)
    stand.d.set(capabilities=IMPORT_ONLY)
    _, d = stand.begin(request)
    with pytest.raises(NoReplicaError, match="fake computes no prompts: the prefill side ended the transfer"):
        outcome(d)
    assert stand.state(request) is State.FAILED
    assert [entry.error and entry.error.http_status for entry in stand.log(request)] == [503]
    quiet(stand, request)


@pytest.mark.parametrize(
    ("said", "message"),
    [((), "number of first tokens"), ((5, 6), "number of first tokens"), ((1024,), "first token")],
)
def test_first_tokens_that_cannot_be(stand: Stand, said: tuple[int, ...], message: str) -> None:
    request = stand.open(first_token=True)
    stand.p.set(first_tokens=said)
    stand.d.set(capabilities=IMPORT_ONLY)
    _, d = stand.begin(request)
    with pytest.raises(NoReplicaError, match=f"wrong {message}: expected") as caught:
        outcome(d)
    assert isinstance(caught.value.__cause__, FrameError)
    assert stand.said(request) == []
    quiet(stand, request)


def test_the_first_tokens_of_all_samples_come_with_their_logprobs(stand: Stand) -> None:
    asked = Sampling(max_tokens=3, temperature=0.0, n=2, logprobs=1)
    request = stand.open(first_token=True, sampling=asked)
    logprobs = (TokenLogprob(11, -0.5, ((11, -0.5),)), TokenLogprob(21, -0.75, ((11, -0.5),)))
    stand.p.set(first_tokens=(11, 21), first_logprobs=logprobs)
    stand.d.set(capabilities=IMPORT_ONLY, script=[TokenStep((1,), "stop", sample=0), TokenStep((2,), "stop", sample=1)])
    _, job = stand.begin(request)
    assert outcome(job) == {"outcome": "finished", "tokens": 2}
    (admission,) = (work for work in stand.d.works if isinstance(work, FakeAdmission))
    assert admission.first == ((11, 21), logprobs)
    quiet(stand, request)


def test_logprobs_that_p_forgot(stand: Stand) -> None:
    request = stand.open(first_token=True, sampling=Sampling(max_tokens=3, temperature=0.0, logprobs=1))
    stand.p.set(first_tokens=(11,))
    stand.d.set(capabilities=IMPORT_ONLY)
    _, job = stand.begin(request)
    with pytest.raises(NoReplicaError, match="wrong logprobs of first tokens"):
        outcome(job)
    quiet(stand, request)


def test_a_token_nobody_asked_for(stand: Stand) -> None:
    request = stand.open()
    stand.p.set(first_tokens=(5,))
    _, d = stand.begin(request)
    _recomputed(stand, request, d, "frame_invalid")


def test_a_route_for_another_kind_of_engine(stand: Stand) -> None:
    request = stand.open(first_token=True)
    with pytest.raises(EngineError, match="another kind of engine"):
        outcome(stand.decode(request))
    assert stand.d.works == []
    assert stand.state(request) is State.FAILED
    quiet(stand, request)


# -- D fails, and P with it


def test_no_room_for_long(build: Build) -> None:
    """That is D's own failure: to compute the prompt needs the same room. P does not wait for more."""
    stand = build(d_limits=HandoffSettings(accept_s=0.3))
    request = stand.open()
    stand.d.set(seats=0)
    p, d = stand.begin(request)
    assert isinstance(failure(d), DeadlineError)
    assert isinstance(failure(p), HandoffCancelledError)
    assert stand.state(request) is State.FAILED
    assert stand.p.live == []
    assert [entry.error and entry.error.code for entry in stand.log(request)] == ["deadline_exceeded"]
    quiet(stand, request)


def test_an_import_that_fails_frees_p(stand: Stand) -> None:
    request = stand.open()
    stand.d.set(imports=1)
    p, d = stand.begin(request)
    eventually(lambda: stream.gauges(stand.client).waiters == 1, "P waits for credit")
    stand.d.set(failure=EngineError("D broke"))
    assert isinstance(failure(d), EngineError)
    assert isinstance(failure(p), HandoffCancelledError | StaleAttemptError)
    assert stand.state(request) is State.FAILED
    assert stand.p.live == []
    quiet(stand, request)


def test_decoding_that_fails_keeps_what_was_said(stand: Stand) -> None:
    request = stand.open()
    stand.d.set(tokens=2, decode_error=EngineError("D broke"))
    _, d = stand.begin(request)
    assert isinstance(failure(d), EngineError)
    assert stand.said(request) == list(text(request)[:2])
    last = stand.log(request)[-1]
    assert last.error is not None
    assert (last.error.code, last.error.retryable, last.error.http_status) == ("engine_failed", True, 502)
    assert stand.field(request, "error") == "engine_failed"
    quiet(stand, request)


def test_a_lost_payload_is_recomputed_and_the_pages_in_flight_go_at_once(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = stand.open()
    payloads, reply_into = itertools.count(1), Link.reply_into

    def gone_before_the_second(link: Link, target: memoryview) -> memoryview | Exception:
        got = reply_into(link, target)
        if next(payloads) != 2:
            return got
        stand.client.unlink(keys.HandoffKeys(request.handoff_id).payload("1.1", 2))
        return target[:0]

    monkeypatch.setattr(Link, "reply_into", gone_before_the_second)
    stand.d.set(imports=0, tokens=0)
    p, d = stand.begin(request)
    eventually(lambda: stream.gauges(stand.client).waiters == 1, "two pages in flight")
    stand.d.set(imports=4)
    assert isinstance(failure(p), StaleAttemptError)
    stand.await_state(request, State.COMMITTED)
    assert stream.gauges(stand.client) == (0, 0, 0)
    stand.d.set(tokens=3)
    _recomputed(stand, request, d, "page_missing")


# -- several samples


def test_the_end_of_one_sample_is_not_the_end(stand: Stand) -> None:
    """Two samples with logprobs: every entry says whose it is, and only the last one is a terminal."""
    request = stand.open(sampling=Sampling(max_tokens=2, temperature=0.0, n=2, logprobs=1))
    drawn = [TokenLogprob(token, -0.5, ((token, -0.5),)) for token in (11, 12, 21, 22)]
    stand.d.set(
        script=[
            TokenStep((11,), sample=0, logprobs=(drawn[0],)),
            TokenStep((21,), sample=1, logprobs=(drawn[2],)),
            TokenStep((22,), "stop", sample=1, logprobs=(drawn[3],)),
            TokenStep((12,), "length", sample=0, logprobs=(drawn[1],)),
        ]
    )
    _, job = stand.begin(request)
    assert outcome(job) == {"outcome": "finished", "tokens": 4}
    assert stand.log(request) == [
        TokenEntry(0, (11,), sample=0, logprobs=(drawn[0],)),
        TokenEntry(1, (21,), sample=1, logprobs=(drawn[2],)),
        TokenEntry(2, (22,), "stop", sample=1, logprobs=(drawn[3],), more=True),
        TokenEntry(3, (12,), "length", held_tokens=0, sample=0, logprobs=(drawn[1],)),
    ]
    assert stand.state(request) is State.FINISHED
    quiet(stand, request)


def test_that_d_recomputes_is_known_here_before_it_begins(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short answer may be over before any notification comes, and a capture goes by what was seen last."""
    request, admit, known = stand.open(), stand.d.admit, list[str | None]()

    def noted(asked: Request, *, local: bool = False, **rest: Any) -> FakeAdmission:
        if local:
            seen = stand.d_services.signals.seen(asked.handoff_id)
            known.append(seen.recomputed if seen else None)
        return admit(asked, local=local, **rest)

    monkeypatch.setattr(stand.d, "admit", noted)
    stand.p.set(bad_page=2)
    _, job = stand.begin(request)
    assert outcome(job) == FINISHED
    assert known == ["peer_aborted"]
