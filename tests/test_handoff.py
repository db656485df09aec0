"""The transition table, and the same table as the broker's scripts enforce it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from redis import Redis

from pipeline import handoff
from pipeline.broker import channel, keys
from pipeline.broker.channel import ErrorInfo, TokenEntry
from pipeline.broker.clock import BrokerClock
from pipeline.broker.ledger import Change, Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.record import Accept
from pipeline.contract import Contract
from pipeline.errors import HandoffCancelledError
from pipeline.handoff import TERMINAL, TRANSITIONS, Attempts, Event, IllegalTransitionError, State
from pipeline.request import Request, Sampling
from pipeline.settings import Settings
from tests.begun import begin

PAIRS = [(state, event) for state in State for event in Event]
CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)


# -- the table


def test_every_state_is_reached_and_every_event_is_used() -> None:
    reached, fresh = set(), {State.CREATED}
    while fresh:
        reached |= fresh
        fresh = {to for (state, _), to in TRANSITIONS.items() if state in fresh} - reached
    assert reached == set(State)
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_nothing_follows_a_terminal_state() -> None:
    assert {State.FINISHED, State.FAILED, State.CANCELLED} == TERMINAL
    assert [state for state, _ in TRANSITIONS if state in TERMINAL] == []


def test_every_live_state_can_end_in_every_way_it_should() -> None:
    """It may fail and may be cancelled; only what D has committed may finish, and a cancel is never undone."""
    live = set(State) - TERMINAL
    assert {state for state, event in TRANSITIONS if event is Event.FAIL} == live
    assert {state for state, event in TRANSITIONS if event is Event.CANCEL} == live
    assert {state for state, event in TRANSITIONS if event is Event.FINISH} == {State.COMMITTED, State.DECODING}
    ending = {to for (state, _), to in TRANSITIONS.items() if state in (State.CANCELLING, State.DRAINING)}
    assert ending == {State.CANCELLING, State.DRAINING, State.FAILED, State.CANCELLED}


def test_no_token_before_commit() -> None:
    """Every way to DECODING or FINISHED passes through COMMITTED."""
    reached, fresh = set(), {State.CREATED}
    while fresh:
        reached |= fresh
        fresh = {to for (state, _), to in TRANSITIONS.items() if state in fresh} - reached - {State.COMMITTED}
    assert reached.isdisjoint({State.DECODING, State.FINISHED})


@pytest.mark.parametrize(
    ("events", "states"),
    [
        (
            "start start accept import import commit emit emit finish",
            "admitted admitted accepted streaming streaming committed decoding decoding finished",
        ),
        (
            "start accept import resend start accept import",
            "admitted accepted streaming streaming streaming accepted streaming",
        ),
        (
            "start start accept import commit emit takeover start accept import commit emit finish",
            "admitted admitted accepted streaming committed decoding created admitted accepted streaming committed "
            "decoding finished",
        ),
        ("start accept commit finish", "admitted accepted committed finished"),
        (
            "start commit emit cancel drain cancel release",
            "admitted committed decoding cancelling draining draining cancelled",
        ),
        ("cancel cancel release", "cancelling cancelling cancelled"),
        ("start cancel fail", "admitted cancelling failed"),
        ("start accept import commit emit fail", "admitted accepted streaming committed decoding failed"),
    ],
    ids=[
        "whole",
        "new attempt of P",
        "another D",
        "held",
        "local, cancelled",
        "cancelled early",
        "failed at the end",
        "failed",
    ],
)
def test_lives(events: str, states: str) -> None:
    state, seen = State.CREATED, []
    for event in events.split():
        state = handoff.after(state, Event(event))
        seen.append(state.value)
    assert seen == states.split()


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_can_and_after_are_the_table(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert handoff.can(state, event)
        assert handoff.after(state, event) is TRANSITIONS[state, event]
        assert handoff.sources(event)[state] is TRANSITIONS[state, event]
        return
    assert not handoff.can(state, event)
    assert state not in handoff.sources(event)
    with pytest.raises(IllegalTransitionError, match=f"^{event} cannot happen to a handoff that is {state}$") as caught:
        handoff.after(state, event)
    assert (caught.value.state, caught.value.event) == (state, event)


def test_attempts_print_as_the_fence_and_order_as_pairs() -> None:
    assert str(Attempts(prefill=3, decode=12)) == "3.12"
    assert Attempts(1, 2) < Attempts(2, 1) < Attempts(2, 2)


# -- the scripts


class Life:
    """One handoff in a real ledger, with both workers in it but where it is released. One verb per event."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self.ledger = Ledger(client, PageServers(client, Settings().broker), BrokerClock(client), Settings())
        self.request = Request(secrets.token_hex(16), (1, 2, 3), Sampling(max_tokens=4))
        self.id = self.request.handoff_id
        self.record = keys.HandoffKeys(self.id).record
        begin(self.ledger, self.request, CONTRACT, {"decode_replica": "d"}, "api")
        client.hset(self.record, mapping={"decode_attempt": 1, "prefill_attempt": 1})

    @property
    def state(self) -> State:
        return State((self.client.hget(self.record, "state") or b"").decode())  # type: ignore[union-attr]

    @state.setter
    def state(self, state: State) -> None:
        self.client.hset(self.record, "state", state)

    def suffer(self, event: Event) -> bool:
        """Let `event` happen; False when it was refused."""
        self.client.hset(self.record, mapping={"decode_worker": "d@1", "prefill_worker": "p@1"})
        try:
            self._VERBS[event](self)
        except (HandoffCancelledError, IllegalTransitionError):
            return False
        return True

    def _emit(self, finish: str | None) -> None:
        said = int(self.client.hget(self.record, "tokens") or 0)
        self.ledger.emit(self.id, 1, TokenEntry(said, (5,), finish))

    def _release(self) -> None:
        for role in ("prefill", "decode"):
            attempt = int(self.client.hget(self.record, f"{role}_attempt") or 0)
            self.ledger.leave(self.id, "prefill" if role == "prefill" else "decode", attempt)

    def _reassign(self, event: Event) -> None:
        if not self.ledger.reassign(self.id, event, lambda record: Change({}, ("nothing",), lambda pipe: None)):
            raise IllegalTransitionError(self.state, event)

    _VERBS: Mapping[Event, Callable[[Life], object]] = {
        Event.START: lambda life: life.ledger.enter(life.id, "prefill", "p@1", "its token"),
        Event.ACCEPT: lambda life: life.ledger.accept(life.id, Accept(1, 1, 0), {}),
        Event.RESEND: lambda life: life._reassign(Event.RESEND),
        Event.TAKEOVER: lambda life: life._reassign(Event.TAKEOVER),
        Event.IMPORT: lambda life: life.ledger.advance(life.id, "decode", 1, Event.IMPORT),
        Event.COMMIT: lambda life: life.ledger.advance(life.id, "decode", 1, Event.COMMIT),
        Event.EMIT: lambda life: life._emit(None),
        Event.CANCEL: lambda life: life.ledger.cancel(life.id, "client"),
        Event.DRAIN: lambda life: life.ledger.advance(life.id, "decode", 1, Event.DRAIN),
        Event.FINISH: lambda life: life._emit("stop"),
        Event.FAIL: lambda life: life.ledger.fail(life.id, ErrorInfo("x", "y", False, 500), 1),
        Event.RELEASE: lambda life: life._release(),
    }


_ANSWERS = {Event.CANCEL, Event.FAIL, Event.RELEASE}  # these are not refused: they read the winner


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_the_scripts_know_the_same_table(redis_client: Redis, state: State, event: Event) -> None:
    life = Life(redis_client)
    life.state = state
    happened = life.suffer(event)
    assert life.state is TRANSITIONS.get((state, event), state)
    assert happened is (event in _ANSWERS or (state, event) in TRANSITIONS)


@pytest.mark.parametrize("state", State)
def test_a_stop_string_is_the_same_finish(redis_client: Redis, state: State) -> None:
    life = Life(redis_client)
    life.state = state
    assert life.ledger.stop(life.id) is handoff.can(state, Event.FINISH)
    assert life.state is TRANSITIONS.get((state, Event.FINISH), state)


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.sampled_from(list(Event)), max_size=30))
def test_table_and_scripts_in_lockstep(redis_client: Redis, events: list[Event]) -> None:
    """Any events in any order: the same states, one terminal at most, and exactly one last entry for the client."""
    life, state, terminals = Life(redis_client), State.CREATED, 0
    for event in events:
        life.suffer(event)
        ended = state in TERMINAL
        state = handoff.after(state, event) if handoff.can(state, event) else state
        terminals += not ended and state in TERMINAL
        assert life.state is state
    log = redis_client.lrange(keys.HandoffKeys(life.id).tokens, 0, -1)
    last = [entry for entry in log if channel.decode(entry).last]
    assert (len(last), terminals) == ((1, 1) if state in TERMINAL else (0, 0))
    assert last == log[-1:] * terminals
