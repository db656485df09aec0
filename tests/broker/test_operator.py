"""What a person sees and asks, against a ledger and a registry on real servers."""

from __future__ import annotations

import secrets

import pytest
from redis import Redis

from pipeline.broker import queue
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.clock import BrokerClock
from pipeline.broker.ledger import Ledger
from pipeline.broker.operator import Operator
from pipeline.broker.page_server import PageServers
from pipeline.broker.queue import DECODE_JOB, JobSpec
from pipeline.broker.registry import Registry, Replica
from pipeline.contract import Contract
from pipeline.errors import EngineError
from pipeline.handoff import State
from pipeline.request import Request, Sampling
from pipeline.settings import Settings
from tests.begun import begin

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)
REPLICA = Replica("d", "reference", "both", "tiny", CONTRACT, slots=2, started_ms=0)
ROUTE = {"prefill_engine": "reference", "decode_engine": "mlx", "decode_replica": "d"}
SETTINGS = Settings()


@pytest.fixture
def ledger(redis_client: Redis) -> Ledger:
    return Ledger(redis_client, PageServers(redis_client, SETTINGS.broker), BrokerClock(redis_client), SETTINGS)


@pytest.fixture
def operator(redis_client: Redis) -> Operator:
    return Operator(redis_client, SETTINGS)


def _open(ledger: Ledger, tokens: int = 3) -> str:
    request = Request(secrets.token_hex(16), tuple(range(1, tokens + 1)), Sampling(max_tokens=4))
    ledger.own("api-1", 30)
    begin(ledger, request, CONTRACT, ROUTE, "api-1")
    return request.handoff_id


def _fail(ledger: Ledger, handoff_id: str) -> None:
    attempt, _ = ledger.enter(handoff_id, "decode", "d@1")
    ledger.fail(handoff_id, ErrorInfo.of(EngineError("no")), attempt)
    ledger.leave(handoff_id, "decode", attempt, fields={"decode_replica": "d"})


def test_live_handoffs_come_first_and_the_newest_of_them_before_all(ledger: Ledger, operator: Operator) -> None:
    ended = [_open(ledger, 5), _open(ledger)]
    for handoff_id in ended:
        _fail(ledger, handoff_id)
    live = [_open(ledger), _open(ledger)]
    seen = operator.handoffs()
    assert [trace["handoff_id"] for trace in seen] == [*live[::-1], *ended[::-1]]
    assert [trace["live"] for trace in seen] == [True, True, False, False]
    assert [trace["state"] for trace in seen] == ["created", "created", "failed", "failed"]
    assert (seen[3]["prompt_tokens"], seen[3]["error"]) == (5, "engine_failed")
    assert (seen[3]["replicas"]["decode"], seen[3]["workers"]["decode"]) == ("d", None)
    assert [trace["handoff_id"] for trace in operator.handoffs(recent=1)] == [*live[::-1], ended[1]]
    assert [trace["handoff_id"] for trace in operator.handoffs(recent=0)] == live[::-1]
    assert abs(operator.now_ms() - seen[0]["created_ms"]) < 60_000


def test_one_handoff_is_found_live_ended_and_cleaned_up(ledger: Ledger, operator: Operator) -> None:
    handoff_id = _open(ledger)
    found = operator.handoff(handoff_id)
    assert found is not None
    assert (found["live"], found["state"], found["route"]) == (True, "created", ROUTE)
    _fail(ledger, handoff_id)
    ledger.forget(handoff_id)
    assert ledger.load(handoff_id) is None
    found = operator.handoff(handoff_id)
    assert found is not None
    assert (found["live"], found["state"]) == (False, "failed")
    assert operator.handoff("f" * 32) is None


def test_a_cancel_says_what_followed(ledger: Ledger, operator: Operator) -> None:
    handoff_id = _open(ledger)
    assert operator.cancel(handoff_id) is State.CANCELLED  # nobody had begun
    assert operator.cancel("f" * 32) is None
    (seen,) = operator.handoffs()
    assert (seen["state"], seen["reason"]) == ("cancelled", "operator")
    ledger.enter(handoff_id := _open(ledger), "decode", "d@1")
    assert operator.cancel(handoff_id) is State.CANCELLING


def test_queues_are_those_asked_for_and_those_that_had_jobs(redis_client: Redis, operator: Operator) -> None:
    with redis_client.pipeline() as pipe:
        queue.enqueue(pipe, redis_client, JobSpec("decode.lost", DECODE_JOB, "h", {}), SETTINGS.broker)
        pipe.execute()
    assert operator.queues(["decode.d"]) == {"decode.d": (0, 0, 0, 0, 0), "decode.lost": (1, 0, 0, 0, 0)}
    assert list(operator.queues(["z", "a"])) == ["a", "decode.lost", "z"]


def test_replicas_budget_and_server(redis_client: Redis, operator: Operator) -> None:
    registry = Registry(redis_client)
    registry.register(REPLICA, 30)
    assert operator.replicas() == [REPLICA]
    assert (operator.drain("d"), operator.drain("nobody")) == (True, False)
    assert registry.heartbeat("d", {}, {}, 30) is True
    assert operator.budget() == (0, 0, 0)
    assert operator.server().policy == "noeviction"


def test_the_link_is_timed_and_leaves_nothing(redis_client: Redis, operator: Operator) -> None:
    found = operator.link("x", 1 << 16, rounds=2)
    assert found.round_trip_ms > 0
    assert found.write_mb_s > 0
    assert found.read_mb_s > 0
    assert redis_client.keys("*") == []


def test_skew_is_against_the_brokers_clock(redis_client: Redis, operator: Operator) -> None:
    seconds, _ = redis_client.time()
    assert 90_000 < operator.skew_ms((seconds + 150) * 1000) <= 151_000
