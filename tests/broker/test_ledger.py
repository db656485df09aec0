"""The ledger's scripts against real servers: one terminal state, fenced attempts, nothing left behind."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from pipeline.broker import keys, stream
from pipeline.broker.channel import ErrorInfo, TokenEntry
from pipeline.broker.clock import BrokerClock
from pipeline.broker.credit import Credit
from pipeline.broker.ledger import Change, Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.record import Accept, Record
from pipeline.broker.scripts import Scripts
from pipeline.contract import Contract
from pipeline.errors import BrokerError, HandoffCancelledError, StaleAttemptError
from pipeline.handoff import Attempts, Event, IllegalTransitionError, State
from pipeline.request import Request, Sampling
from pipeline.settings import Settings
from tests.begun import begin

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)
ROUTE = {"prefill_engine": "reference", "prefill_queue": "prefill.reference.x", "decode_replica": "d"}


@pytest.fixture
def ledger(redis_client: Redis) -> Ledger:
    return Ledger(redis_client, PageServers(redis_client, Settings().broker), BrokerClock(redis_client), Settings())


@pytest.fixture
def handoff(ledger: Ledger) -> str:
    request = Request(secrets.token_hex(16), (1, 2, 3), Sampling(max_tokens=4), salt="s")
    ledger.own("api-1", 30)
    begin(ledger, request, CONTRACT, ROUTE, "api-1")
    return request.handoff_id


def _admit(ledger: Ledger, handoff: str) -> tuple[int, int]:
    p, _ = ledger.enter(handoff, "prefill", "p-0")
    d, _ = ledger.enter(handoff, "decode", "d-0")
    ledger.accept(handoff, Accept(p, d, 0), {})
    return p, d


def _another(ledger: Ledger, handoff: str, event: Event, **fields: int) -> bool:
    return ledger.reassign(handoff, event, lambda record: Change(fields, ("prefill_worker",), lambda pipe: None))


def _leftovers(client: Redis) -> list[str]:
    total = int(client.get(keys.BUDGET_TOTAL) or 0)
    live = [k.decode() for k in client.scan_iter("cf:*{*") if b"{" in k] + ["live"] * client.exists(keys.LIVE)
    return sorted(live) + ([f"budget {total}"] if total else [])


def test_create_keeps_the_request_and_enqueues_in_the_same_transaction(ledger: Ledger, redis_client: Redis) -> None:
    request = Request(secrets.token_hex(16), (7, 8), Sampling(max_tokens=1, stop_token_ids=(2,)), salt="x")
    begin(ledger, request, CONTRACT, ROUTE, "api-1", [("RPUSH", "jobs", "one", "two")])
    record = ledger.load(request.handoff_id)
    assert record is not None
    assert record.request == request
    assert record.contract == CONTRACT
    assert record.state is State.CREATED
    assert record.route == ROUTE
    assert redis_client.lrange("jobs", 0, -1) == [b"one", b"two"]
    assert 0 < redis_client.pttl(keys.HandoffKeys(request.handoff_id).record) <= 900_000
    assert ledger.live() == [request.handoff_id]


def test_life_of_a_handoff(ledger: Ledger, handoff: str, redis_client: Redis) -> None:
    p, d = _admit(ledger, handoff)
    record = ledger.load(handoff)
    assert record is not None
    assert record.accept == Accept(p, d, 0) == Accept(1, 1, 0)
    assert ledger.advance(handoff, "decode", d, Event.IMPORT) is State.STREAMING
    assert ledger.advance(handoff, "decode", d, Event.COMMIT, {"reused_tokens": 0}) is State.COMMITTED
    ledger.leave(handoff, "prefill", p, fields={"pages": 1})
    assert ledger.emit(handoff, d, TokenEntry(0, (5, 6))) is State.DECODING
    assert ledger.emit(handoff, d, TokenEntry(2, (7,), finish="stop", held_tokens=0)) is State.FINISHED
    log = [json.loads(e) for e in redis_client.lrange(keys.HandoffKeys(handoff).tokens, 0, -1)]
    assert [(e["seq"], e["token_ids"], e.get("finish")) for e in log] == [(0, [5, 6], None), (2, [7], "stop")]
    ledger.leave(handoff, "decode", d)
    assert ledger.live() == []
    trace = ledger.trace(handoff)
    assert trace is not None
    assert (trace["state"], trace["pages"], trace["tokens"], trace["prompt_tokens"]) == ("finished", 1, 3, 3)
    assert [_settle(ledger, redis_client, handoff) for _ in range(2)] == [trace, None]
    assert _leftovers(redis_client) == []
    assert [t["handoff_id"] for t in ledger.recent(5)] == [handoff]


def _settle(ledger: Ledger, client: Redis, handoff: str) -> dict[str, Any] | None:
    reply: Any = Scripts(client).run(*ledger.settling(handoff, shown=True))
    return ledger.settled(handoff, reply)


@pytest.mark.parametrize("api_first", [True, False])
def test_record_goes_when_both_api_and_workers_are_done(
    ledger: Ledger, handoff: str, redis_client: Redis, api_first: bool
) -> None:
    p, d = _admit(ledger, handoff)
    ledger.fail(handoff, ErrorInfo("x", "y", False, 500), d)
    if api_first:
        ledger.forget(handoff)
    ledger.leave(handoff, "prefill", p)
    assert ledger.load(handoff) is not None
    ledger.leave(handoff, "decode", d)
    if not api_first:
        assert ledger.load(handoff) is not None
        ledger.forget(handoff)
    assert _leftovers(redis_client) == []


def test_cancel_with_nobody_at_work_is_terminal_at_once(ledger: Ledger, handoff: str, redis_client: Redis) -> None:
    assert ledger.cancel(handoff, "client") is State.CANCELLED
    entry = json.loads(redis_client.lindex(keys.HandoffKeys(handoff).tokens, -1) or "")
    assert entry["error"]["code"] == "cancelled"
    with pytest.raises(HandoffCancelledError, match="cancelled"):
        ledger.enter(handoff, "prefill", "p-0")
    ledger.forget(handoff)
    assert _leftovers(redis_client) == []


def test_cancel_waits_for_the_last_worker(ledger: Ledger, handoff: str) -> None:
    p, d = _admit(ledger, handoff)
    assert ledger.cancel(handoff, "client") is State.CANCELLING
    assert ledger.cancel(handoff, "client") is State.CANCELLING
    assert ledger.advance(handoff, "decode", d, Event.DRAIN) is State.DRAINING
    ledger.leave(handoff, "decode", d)
    record = ledger.load(handoff)
    assert record is not None
    assert record.state is State.DRAINING
    ledger.leave(handoff, "prefill", p)
    record = ledger.load(handoff)
    assert record is not None
    assert record.state is State.CANCELLED


def test_cancel_racing_a_finish_reads_the_winner(ledger: Ledger, handoff: str) -> None:
    _, d = _admit(ledger, handoff)
    ledger.advance(handoff, "decode", d, Event.COMMIT)
    ledger.emit(handoff, d, TokenEntry(0, (1,), finish="length"))
    assert ledger.cancel(handoff, "client") is State.FINISHED
    assert ledger.stop(handoff) is False
    assert ledger.fail(handoff, ErrorInfo("x", "y", False, 500), d) is False


def test_cancel_of_an_unknown_handoff(ledger: Ledger) -> None:
    assert ledger.cancel("0" * 32, "client") is None


def test_stop_string_finishes_and_later_tokens_do_not_count(ledger: Ledger, handoff: str, redis_client: Redis) -> None:
    _, d = _admit(ledger, handoff)
    ledger.advance(handoff, "decode", d, Event.COMMIT)
    ledger.emit(handoff, d, TokenEntry(0, (1, 2)))
    assert ledger.stop(handoff) is True
    with pytest.raises(HandoffCancelledError, match="finished"):
        ledger.emit(handoff, d, TokenEntry(2, (3,)))
    assert redis_client.llen(keys.HandoffKeys(handoff).tokens) == 1


def test_a_newer_attempt_fences_the_older(ledger: Ledger, handoff: str) -> None:
    old, _ = ledger.enter(handoff, "decode", "d-0")
    assert _another(ledger, handoff, Event.TAKEOVER, decode_attempt=2)
    new, _ = ledger.enter(handoff, "decode", "d-1")
    assert (old, new) == (1, 2)
    with pytest.raises(StaleAttemptError):
        ledger.advance(handoff, "decode", old, Event.COMMIT)
    with pytest.raises(StaleAttemptError):
        ledger.emit(handoff, old, TokenEntry(0, (1,)))
    ledger.leave(handoff, "decode", old)  # changes nothing of the new attempt's
    record = ledger.load(handoff)
    assert record is not None
    assert record.worker("decode") == "d-1"


def test_a_job_is_begun_once(ledger: Ledger, handoff: str) -> None:
    """A second job of the same attempt, wherever it comes from, finds nothing to do; a repeated call is the same."""
    assert ledger.enter(handoff, "decode", "d-0", "token")[0] == 1
    assert ledger.enter(handoff, "decode", "d-0", "token")[0] == 1
    with pytest.raises(HandoffCancelledError, match="begun by another worker"):
        ledger.enter(handoff, "decode", "d-1", "other")
    ledger.leave(handoff, "decode", 1)
    with pytest.raises(HandoffCancelledError, match="begun by another worker"):
        ledger.enter(handoff, "decode", "d-1")


def test_a_decode_job_is_for_the_replica_of_the_route(ledger: Ledger, handoff: str) -> None:
    with pytest.raises(HandoffCancelledError, match="with another replica by now"):
        ledger.enter(handoff, "decode", "e@1")
    assert ledger.enter(handoff, "decode", "d@1")[0] == 1


def test_no_prefill_job_of_a_local_route_is_begun(ledger: Ledger) -> None:
    request = Request(secrets.token_hex(16), (7, 8), Sampling(max_tokens=1))
    begin(ledger, request, CONTRACT, {**ROUTE, "prefill_queue": None}, "api-1")
    with pytest.raises(HandoffCancelledError, match="begun by another worker"):
        ledger.enter(request.handoff_id, "prefill", "p@1")


def test_a_reassignment_is_all_or_nothing(ledger: Ledger, handoff: str, redis_client: Redis) -> None:
    _, d = _admit(ledger, handoff)

    def change(record: Record) -> Change:
        seen.append(record.state)
        if len(seen) == 1:  # somebody writes between the look and the transaction
            ledger.advance(handoff, "decode", d, Event.IMPORT)
        return Change({"decode_attempt": 2}, ("decode_worker",), lambda pipe: pipe.rpush("jobs", "one"))

    seen: list[State] = []
    assert ledger.reassign(handoff, Event.TAKEOVER, change) is True
    assert seen == [State.ACCEPTED, State.STREAMING]
    record = ledger.load(handoff)
    assert record is not None
    assert (record.state, record.attempt("decode"), record.worker("decode")) == (State.CREATED, 2, None)
    assert redis_client.lrange("jobs", 0, -1) == [b"one"]
    assert ledger.reassign(handoff, Event.TAKEOVER, lambda record: None) is False
    ledger.fail(handoff, ErrorInfo("x", "y", False, 500))
    assert ledger.reassign(handoff, Event.TAKEOVER, change) is False
    assert ledger.reassign("0" * 32, Event.TAKEOVER, change) is False
    assert redis_client.lrange("jobs", 0, -1) == [b"one"]


def test_whoever_goes_on_reads_what_was_emitted_before(ledger: Ledger, handoff: str, redis_client: Redis) -> None:
    _, d = _admit(ledger, handoff)
    ledger.advance(handoff, "decode", d, Event.COMMIT)
    for at, token in enumerate((11, 12, 13)):
        ledger.emit(handoff, d, TokenEntry(at, (token,)))
    record = ledger.load(handoff)
    assert record is not None
    assert ledger.request_of(record) == record.request
    taken = replace(record, fields={**record.fields, "resumed": "2"})
    assert ledger.request_of(taken) == replace(
        record.request,
        token_ids=(1, 2, 3, 11, 12),
        sampling=replace(record.request.sampling, max_tokens=2),
        answered=2,
    )
    redis_client.ltrim(keys.HandoffKeys(handoff).tokens, 2, -1)
    with pytest.raises(BrokerError, match="has lost entries"):
        ledger.request_of(taken)


def test_samples_are_told_apart_for_whoever_goes_on(ledger: Ledger) -> None:
    request = Request(secrets.token_hex(16), (1, 2, 3), Sampling(max_tokens=4, n=2))
    begin(ledger, request, CONTRACT, ROUTE, "api-1")
    _, d = _admit(ledger, request.handoff_id)
    ledger.advance(request.handoff_id, "decode", d, Event.COMMIT)
    ledger.emit(request.handoff_id, d, TokenEntry(0, (11,)))
    ledger.emit(request.handoff_id, d, TokenEntry(1, (21, 22), finish="stop", sample=1, more=True))
    ledger.emit(request.handoff_id, d, TokenEntry(3, (12,)))
    record = ledger.load(request.handoff_id)
    assert record is not None
    taken = replace(record, fields={**record.fields, "resumed": "4"})
    assert ledger.request_of(taken) == replace(request, again=((11, 12), (21, 22)))


def test_an_entry_whose_reply_was_lost_is_sent_again_and_appended_once(
    ledger: Ledger, handoff: str, redis_client: Redis
) -> None:
    _, d = _admit(ledger, handoff)
    ledger.advance(handoff, "decode", d, Event.COMMIT)
    log = keys.HandoffKeys(handoff).tokens
    with redis_client.pubsub() as told:
        told.subscribe(keys.HandoffKeys(handoff).notify)
        for entry, state in (
            (TokenEntry(0, (5, 5)), State.DECODING),
            (TokenEntry(2, (5,)), State.DECODING),
            (TokenEntry(3, (5,), finish="stop", held_tokens=0), State.FINISHED),
        ):
            assert [ledger.emit(handoff, d, entry) for _ in range(3)] == [state] * 3
            assert redis_client.lindex(log, -1) == entry.encode().encode()
        heard = [message for _ in range(8) if (message := told.get_message(timeout=0.2))]
    assert redis_client.llen(log) == 3
    assert redis_client.hget(keys.HandoffKeys(handoff).record, "tokens") == b"4"
    assert [message["type"] for message in heard] == ["subscribe", "message", "message", "message"]


def test_what_looks_like_a_repeat_is_refused_from_an_older_attempt(ledger: Ledger, handoff: str) -> None:
    _, d = _admit(ledger, handoff)
    ledger.advance(handoff, "decode", d, Event.COMMIT)
    ledger.emit(handoff, d, TokenEntry(0, (5,)))
    assert _another(ledger, handoff, Event.TAKEOVER, decode_attempt=2)
    with pytest.raises(StaleAttemptError):
        ledger.emit(handoff, d, TokenEntry(0, (5,)))


def test_tokens_out_of_sequence_are_refused(ledger: Ledger, handoff: str) -> None:
    _, d = _admit(ledger, handoff)
    ledger.advance(handoff, "decode", d, Event.COMMIT)
    ledger.emit(handoff, d, TokenEntry(0, (1,)))
    for seq in (0, 2):
        with pytest.raises(StaleAttemptError):
            ledger.emit(handoff, d, TokenEntry(seq, (2,)))


def test_illegal_transition_names_state_and_event(ledger: Ledger, handoff: str) -> None:
    d, _ = ledger.enter(handoff, "decode", "d-0")
    with pytest.raises(IllegalTransitionError, match="emit cannot happen to a handoff that is admitted"):
        ledger.emit(handoff, d, TokenEntry(0, (1,)))


def test_error_of_p_is_kept_for_d_and_cleared_by_the_next_attempt(ledger: Ledger, handoff: str) -> None:
    p, _ = _admit(ledger, handoff)
    error = ErrorInfo("engine_failed", "no", True, 502)
    ledger.leave(handoff, "prefill", p, error=error)
    record = ledger.load(handoff)
    assert record is not None
    assert record.error("prefill") == error
    assert _another(ledger, handoff, Event.RESEND, prefill_attempt=2)
    attempt, record = ledger.enter(handoff, "prefill", "p-1")
    assert (attempt, record.attempt("prefill"), record.error("prefill")) == (2, 2, None)


def test_everything_a_handoff_needs_to_end_works_at_oom(ledger: Ledger, handoff: str, redis_client: Redis) -> None:
    p, d = _admit(ledger, handoff)
    ledger.advance(handoff, "decode", d, Event.COMMIT)
    redis_client.config_set("maxmemory", 1)
    ledger.own("api-1", 30)
    ledger.emit(handoff, d, TokenEntry(0, (1,)))
    ledger.leave(handoff, "prefill", p)
    ledger.emit(handoff, d, TokenEntry(1, (2,), finish="stop"))
    ledger.leave(handoff, "decode", d)
    ledger.forget(handoff)
    redis_client.config_set("maxmemory", 0)
    assert _leftovers(redis_client) == []


def test_owner_lease(ledger: Ledger, handoff: str, redis_client: Redis) -> None:
    record = ledger.load(handoff)
    assert record is not None
    assert ledger.owned(record) is True
    assert ledger.owned(replace(record, fields={**record.fields, "owner": "api-2"})) is False


def test_release_returns_credit_and_unlinks_pages(ledger: Ledger, handoff: str, redis_client: Redis) -> None:
    settings = Settings().broker
    attempts = Attempts(1, 1)
    stream.raise_fence(redis_client, handoff, attempts, settings)
    credit = Credit(redis_client, handoff, attempts, settings)
    assert credit.reserve(0, 10) is True
    redis_client.set(credit.payload_key(0), b"x" * 10)
    assert stream.gauges(redis_client).in_flight_bytes == 10
    ledger.cancel(handoff, "client")
    ledger.forget(handoff)
    assert stream.gauges(redis_client).in_flight_bytes == 0
    assert _leftovers(redis_client) == []
