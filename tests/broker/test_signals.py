"""Watches and the process's subscription: a notification only wakes, and a lost one heals."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from urllib.parse import urlsplit

import pytest
from redis import Redis

from pipeline.broker import keys
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import connect_blocking
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.record import Snapshot
from pipeline.broker.signals import Signals, Watch
from pipeline.contract import Contract
from pipeline.errors import DeadlineError, HandoffCancelledError, StaleAttemptError
from pipeline.handoff import State
from pipeline.request import Request, Sampling
from pipeline.settings import Settings
from tests.begun import begin
from tests.proxy import Proxy

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)
PATIENCE_S = 60.0


class Counting(Ledger):
    """Counts how often it is looked into."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client, PageServers(client, Settings().broker), BrokerClock(client), Settings())
        self.looks = 0

    def peek(self, handoff_id: str) -> Snapshot | None:
        self.looks += 1
        return super().peek(handoff_id)


@pytest.fixture
def ledger(redis_client: Redis) -> Counting:
    return Counting(redis_client)


@pytest.fixture
def handoff(ledger: Counting) -> str:
    return _create(ledger)


@pytest.fixture
def signals(ledger: Counting, server_url: str) -> Iterator[Signals]:
    with connect_blocking(server_url) as client:
        made = Signals(client, ledger)
        made.start()
        yield made
        made.close()


def _create(ledger: Ledger) -> str:
    request = Request(secrets.token_hex(16), (1, 2, 3), Sampling(max_tokens=4))
    begin(ledger, request, CONTRACT, {"decode_replica": "d", "prefill_queue": "p"}, "api")
    return request.handoff_id


def _eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never saw {what}"
        time.sleep(0.01)


def _subscribed(client: Redis) -> bool:
    return bool(client.pubsub_numpat() == 1)


def _write(client: Redis, handoff: str, **fields: str) -> None:
    """The record changes and nobody is told."""
    client.hset(keys.HandoffKeys(handoff).record, mapping=fields)  # type: ignore[arg-type]


def _attempt(seen: Snapshot) -> int | None:
    return seen.begun("prefill") * seen.attempt("prefill") or None


# -- one watch, no subscription


def test_checking_is_cheap_and_a_notification_makes_the_next_one_look(ledger: Counting, handoff: str) -> None:
    watch = Watch(ledger, handoff)
    for _ in range(100):
        watch.check()
    assert ledger.looks <= 1  # 0, unless a hundred checks took half a second
    before = ledger.looks
    watch.notify()
    assert watch.due
    watch.check()
    assert ledger.looks == before + 1
    assert watch.snapshot is not None
    assert watch.snapshot.state is State.CREATED


def test_without_a_notification_it_looks_by_itself(ledger: Counting, handoff: str, redis_client: Redis) -> None:
    watch = Watch(ledger, handoff)
    watch.check()
    _write(redis_client, handoff, state=State.CANCELLING)
    _eventually(lambda: watch.due, "the time of the next look")
    with pytest.raises(HandoffCancelledError, match=f"handoff {handoff} is over"):
        watch.check()


@pytest.mark.parametrize("state", State)
def test_what_counts_as_over(ledger: Counting, handoff: str, redis_client: Redis, state: State) -> None:
    over = state in (State.CANCELLING, State.DRAINING, State.FINISHED, State.FAILED, State.CANCELLED)
    _write(redis_client, handoff, state=state)
    watch = Watch(ledger, handoff)
    seen = watch.look()
    assert seen is not None
    assert seen.state is state
    assert watch.stopped is (state is State.FINISHED)
    if over:
        with pytest.raises(HandoffCancelledError):
            watch.check()
    else:
        watch.check()


def test_what_a_newer_attempt_finished_was_not_stopped(ledger: Counting, handoff: str, redis_client: Redis) -> None:
    watch = Watch(ledger, handoff)
    watch.belong("decode", 1)
    _write(redis_client, handoff, state=State.FINISHED, decode_attempt="2")
    watch.look()
    assert watch.stopped is False
    with pytest.raises(StaleAttemptError):
        watch.check()


def test_a_record_that_is_gone_is_over(ledger: Counting, handoff: str, redis_client: Redis) -> None:
    redis_client.flushall()
    watch = Watch(ledger, handoff)
    assert watch.look() is None
    assert watch.stopped is False
    for wait in (watch.check, lambda: watch.wait_for(_attempt, 5, "a prefill worker")):
        with pytest.raises(HandoffCancelledError):
            wait()


def test_once_over_it_does_not_ask_again(ledger: Counting, handoff: str) -> None:
    watch = Watch(ledger, handoff)
    ledger.cancel(handoff, "client")
    watch.look()
    looks = ledger.looks
    watch.notify()
    for _ in range(3):
        with pytest.raises(HandoffCancelledError):
            watch.check()
    assert ledger.looks == looks


def test_waiting_ends_with_what_was_looked_for(ledger: Counting, handoff: str) -> None:
    ledger.enter(handoff, "prefill", "p@1")
    assert Watch(ledger, handoff).wait_for(_attempt, 5, "a prefill worker") == 1


def test_waiting_ends_by_deadline_and_says_for_what(ledger: Counting, handoff: str) -> None:
    with pytest.raises(DeadlineError, match=r"^waited 0\.1 s for a prefill worker$"):
        Watch(ledger, handoff).wait_for(_attempt, 0.1, "a prefill worker")
    with pytest.raises(DeadlineError):
        Watch(ledger, handoff).wait_for(_attempt, 0, "a prefill worker")


def test_what_the_search_raises_ends_the_wait(ledger: Counting, handoff: str) -> None:
    def find(seen: Snapshot) -> int | None:
        raise LookupError("not wanted any more")

    with pytest.raises(LookupError):
        Watch(ledger, handoff).wait_for(find, 5, "anything")


@pytest.mark.parametrize("told", [True, False])
def test_a_waiter_sees_what_another_thread_did(ledger: Counting, handoff: str, redis_client: Redis, told: bool) -> None:
    watch = Watch(ledger, handoff)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(watch.wait_for, _attempt, PATIENCE_S, "a prefill worker")
        _eventually(lambda: ledger.looks, "the first look")
        _write(redis_client, handoff, prefill_attempt="3", prefill_begun="3.x")
        if told:
            watch.notify()
        assert waiting.result(PATIENCE_S) == 3


def test_healing_closes_once_and_on_another_thread(ledger: Counting, handoff: str) -> None:
    watch = Watch(ledger, handoff)
    closed: list[str] = []
    watch.on_over(lambda: closed.append(threading.current_thread().name))
    watch.look()
    watch.heal()
    assert closed == []
    ledger.cancel(handoff, "client")
    watch.notify()
    watch.heal()
    _eventually(lambda: len(closed) == 1, "the closer")
    watch.heal()
    watch.on_over(lambda: closed.append("late"))  # registered after the end: closed by the next look
    watch.heal()
    _eventually(lambda: len(closed) == 2, "the second closer")
    assert closed == [f"close-{handoff[:8]}", "late"]


# -- the process's subscription


def test_a_notification_reaches_every_watch_of_its_handoff_only(
    ledger: Counting, signals: Signals, redis_client: Redis
) -> None:
    one, other = _create(ledger), _create(ledger)
    with signals.watch(one) as first, signals.watch(one) as second, signals.watch(other) as third:
        assert sorted(signals.active()) == sorted([one, other])
        _eventually(lambda: _subscribed(redis_client), "the subscription")
        closed: list[str] = []
        for name, watch in (("first", first), ("second", second), ("third", third)):
            watch.on_over(partial(closed.append, name))
        ledger.cancel(one, "client")
        _eventually(lambda: len(closed) == 2, "both closers")
        assert sorted(closed) == ["first", "second"]
        third.check()
        for watch in (first, second):
            with pytest.raises(HandoffCancelledError):
                watch.check()


def test_a_watch_that_was_left_is_forgotten(ledger: Counting, signals: Signals, handoff: str) -> None:
    with signals.watch(handoff):
        with signals.watch(handoff):
            assert signals.active() == [handoff]
        assert signals.active() == [handoff]
    assert signals.active() == []
    with pytest.raises(LookupError), signals.watch(handoff):
        raise LookupError
    assert signals.active() == []


def test_a_lost_notification_is_healed_where_nobody_checks(
    ledger: Counting, signals: Signals, handoff: str, redis_client: Redis
) -> None:
    """The worker thread is blocked inside its engine: only the closer can wake it."""
    blocked = threading.Event()
    with signals.watch(handoff) as watch:
        watch.on_over(blocked.set)
        _write(redis_client, handoff, state=State.CANCELLING)
        assert blocked.wait(PATIENCE_S)


def test_a_killed_subscription_is_made_again(
    ledger: Counting, signals: Signals, handoff: str, redis_client: Redis
) -> None:
    with signals.watch(handoff) as watch:
        _eventually(lambda: _subscribed(redis_client), "the subscription")
        (before,) = redis_client.client_list(_type="pubsub")
        redis_client.client_kill_filter(_id=before["id"])
        closed = threading.Event()
        watch.on_over(closed.set)
        ledger.cancel(handoff, "client")  # nobody hears it
        assert closed.wait(PATIENCE_S)
        _eventually(lambda: _subscribed(redis_client), "the next subscription")
        (after,) = redis_client.client_list(_type="pubsub")
        assert after["id"] != before["id"]


def test_healing_goes_on_after_the_broker_was_away(server_url: str, redis_client: Redis) -> None:
    with ExitStack() as stack:
        hop = stack.enter_context(Proxy(urlsplit(server_url).port or 0))
        theirs, events = (stack.enter_context(connect_blocking(hop.url)) for _ in range(2))
        ours, ledger = Counting(redis_client), Counting(theirs)
        signals = Signals(events, ledger)
        signals.start()
        handoff = _create(ours)
        with signals.watch(handoff) as watch:
            _eventually(lambda: ledger.looks, "the first look")
            closed = threading.Event()
            watch.on_over(closed.set)
            hop.cut()
            looks = ledger.looks
            _eventually(lambda: ledger.looks >= looks + 2 and hop.refused >= 2, "looks that fail")
            ours.cancel(handoff, "client")
            assert not closed.is_set()
            hop.mend()
            assert closed.wait(PATIENCE_S)
        signals.close()


def test_healing_outlives_what_nobody_expected(ledger: Counting, signals: Signals, redis_client: Redis) -> None:
    """One watch raises each time it is looked at; the other is still healed."""
    broken, sound = _create(ledger), _create(ledger)
    redis_client.hset(keys.HandoffKeys(broken).record, "state", "no state")
    closed = threading.Event()
    with signals.watch(broken), signals.watch(sound) as watch:
        watch.on_over(closed.set)
        _eventually(lambda: ledger.looks >= 2, "a look at both")
        _write(redis_client, sound, state=State.CANCELLING)
        assert closed.wait(PATIENCE_S)


def test_closing_ends_both_threads(ledger: Counting, server_url: str) -> None:
    before = set(threading.enumerate())
    with connect_blocking(server_url) as client:
        signals = Signals(client, ledger)
        signals.start()
        mine = set(threading.enumerate()) - before
        assert {thread.name for thread in mine} == {"signals-listen", "signals-heal"}
        signals.close()
        assert not any(thread.is_alive() for thread in mine)
