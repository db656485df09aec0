"""A handoff begins whole, once, and not after its client was told that it did not."""

from __future__ import annotations

import json
import secrets

import pytest
from redis import Redis

from pipeline.broker import keys
from pipeline.broker.clock import BrokerClock
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.scripts import Scripts
from pipeline.contract import Contract
from pipeline.errors import BrokerError
from pipeline.handoff import State
from pipeline.request import Request, Sampling
from pipeline.settings import Settings
from tests.begun import begin

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)
ROUTE = {"decode_replica": "d", "decode_queue": "decode.d", "prefill_engine": "p", "prefill_queue": "prefill.p"}
JOBS = [("RPUSH", "q", "one", b"\x00\xff\r\n"), ("HSET", "h", "n", 7, "text", "字")]


def _ledger(client: Redis) -> Ledger:
    settings = Settings()
    return Ledger(client, PageServers(client, settings.broker), BrokerClock(client), settings)


def _request() -> Request:
    return Request(secrets.token_hex(16), (1, 2, 3), Sampling(max_tokens=5))


def test_record_owner_and_jobs_are_there_together(redis_client: Redis) -> None:
    ledger, asked = _ledger(redis_client), _request()
    step = ledger.opening(asked, CONTRACT, ROUTE, "api-1", JOBS, "00-trace", owner_ttl_s=10, within_s=60)
    assert Scripts(redis_client).run(*step) == 1
    record = ledger.load(asked.handoff_id)
    assert record is not None
    assert (record.state, record.request, record.contract, record.route) == (State.CREATED, asked, CONTRACT, ROUTE)
    assert (record.attempt("decode"), record.attempt("prefill")) == (1, 1)
    assert record.fields["traceparent"] == "00-trace"
    assert ledger.owned(record)
    assert 0 < redis_client.pttl(keys.owner("api-1")) <= 10_000
    assert redis_client.pttl(keys.HandoffKeys(asked.handoff_id).record) > 0
    assert redis_client.zscore(keys.LIVE, asked.handoff_id) == float(record.fields["at_created"])
    assert redis_client.lrange("q", 0, -1) == [b"one", b"\x00\xff\r\n"]
    assert redis_client.hgetall("h") == {b"n": b"7", b"text": "字".encode()}


def test_every_key_is_declared(redis_client: Redis) -> None:
    asked = _request()
    step = _ledger(redis_client).opening(asked, CONTRACT, ROUTE, "api-1", JOBS, owner_ttl_s=10)
    names = keys.HandoffKeys(asked.handoff_id)
    assert list(step.keys) == [keys.owner("api-1"), names.record, keys.LIVE, "q", "h"]


def test_what_is_read_too_late_does_not_begin(redis_client: Redis) -> None:
    ledger = _ledger(redis_client)
    step = ledger.opening(_request(), CONTRACT, ROUTE, "api-1", JOBS, owner_ttl_s=10, within_s=-0.1)
    assert Scripts(redis_client).run(*step) == 0
    assert redis_client.keys("*") == []


def test_a_full_broker_begins_nothing(redis_client: Redis) -> None:
    ledger, asked = _ledger(redis_client), _request()
    begin(ledger, _request(), CONTRACT, ROUTE, "api-1")  # the script is loaded, the clock is read
    before = redis_client.keys("*")
    redis_client.config_set("maxmemory", 1)
    with pytest.raises(BrokerError, match="is full"):
        begin(ledger, asked, CONTRACT, ROUTE, "api-1", JOBS)
    assert redis_client.keys("*") == before


def test_the_request_is_stored_as_it_was_asked(redis_client: Redis) -> None:
    ledger, asked = _ledger(redis_client), _request()
    begin(ledger, asked, CONTRACT, {**ROUTE, "prefill_queue": None}, "api-1")
    raw = redis_client.hgetall(keys.HandoffKeys(asked.handoff_id).record)
    assert json.loads(raw[b"request"])["token_ids"] == [1, 2, 3]
    assert (raw[b"prefill_attempt"], raw[b"prompt_tokens"], raw[b"owner"]) == (b"0", b"3", b"api-1")
