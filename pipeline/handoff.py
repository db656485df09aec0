"""Handoff: one request's KV moving from P to D, as one literal transition table.

Rules: (1) the table is the machine: no code elsewhere decides what may follow what; (2) a handoff ends in
exactly one terminal state, and whoever loses that race reads the winner. The broker's scripts enforce the same
table by compare-and-set; `docs/handoff.md` draws its diagram from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeline.errors import CrossfillError


class State(StrEnum):
    CREATED = "created"  # in the ledger, jobs enqueued
    ADMITTED = "admitted"  # a worker has begun
    ACCEPTED = "accepted"  # D has room and said which pages it holds
    STREAMING = "streaming"  # D has imported a page
    COMMITTED = "committed"  # D has verified every page
    DECODING = "decoding"  # D has emitted a token
    CANCELLING = "cancelling"  # somebody wants it to end
    DRAINING = "draining"  # a worker has seen that and waits for its device
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(StrEnum):
    START = "start"
    ACCEPT = "accept"
    RESEND = "resend"
    TAKEOVER = "takeover"
    IMPORT = "import"
    COMMIT = "commit"
    EMIT = "emit"
    CANCEL = "cancel"
    DRAIN = "drain"
    FINISH = "finish"
    FAIL = "fail"
    RELEASE = "release"


@dataclass(frozen=True, slots=True, order=True)
class Attempts:
    """Which try of P and of D wrote something: what fences a worker that woke up too late. Both count from 1."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}.{self.decode}"


TERMINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})
_LIVE = (State.CREATED, State.ADMITTED, State.ACCEPTED, State.STREAMING, State.COMMITTED, State.DECODING)
_ENDING = (State.CANCELLING, State.DRAINING)

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CREATED, Event.START): State.ADMITTED,
    (State.ADMITTED, Event.START): State.ADMITTED,  # P and D both begin
    (State.ADMITTED, Event.ACCEPT): State.ACCEPTED,
    (State.ACCEPTED, Event.START): State.ACCEPTED,  # a new attempt of P
    (State.ACCEPTED, Event.ACCEPT): State.ACCEPTED,  # and the fresh accept it needs
    (State.STREAMING, Event.START): State.STREAMING,
    # P's attempt is lost: another one is queued, D keeps what it has imported
    **{(state, Event.RESEND): state for state in (State.CREATED, State.ADMITTED, State.ACCEPTED, State.STREAMING)},
    **{(state, Event.TAKEOVER): State.CREATED for state in _LIVE},  # D's attempt is lost: another D begins anew
    (State.STREAMING, Event.ACCEPT): State.ACCEPTED,
    (State.ACCEPTED, Event.IMPORT): State.STREAMING,
    (State.STREAMING, Event.IMPORT): State.STREAMING,
    (State.ADMITTED, Event.COMMIT): State.COMMITTED,  # D computes the prompt itself
    (State.ACCEPTED, Event.COMMIT): State.COMMITTED,  # nothing had to move
    (State.STREAMING, Event.COMMIT): State.COMMITTED,
    (State.COMMITTED, Event.EMIT): State.DECODING,
    (State.DECODING, Event.EMIT): State.DECODING,
    (State.COMMITTED, Event.FINISH): State.FINISHED,
    (State.DECODING, Event.FINISH): State.FINISHED,
    **{(state, Event.CANCEL): State.CANCELLING for state in _LIVE},
    **{(state, Event.FAIL): State.FAILED for state in (*_LIVE, *_ENDING)},
    (State.CANCELLING, Event.CANCEL): State.CANCELLING,
    (State.CANCELLING, Event.DRAIN): State.DRAINING,
    (State.DRAINING, Event.DRAIN): State.DRAINING,
    (State.DRAINING, Event.CANCEL): State.DRAINING,
    (State.CANCELLING, Event.RELEASE): State.CANCELLED,
    (State.DRAINING, Event.RELEASE): State.CANCELLED,
}


class IllegalTransitionError(CrossfillError):
    """`event` cannot happen in `state`: a bug of ours, or a stale writer."""

    code = "illegal_transition"

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event} cannot happen to a handoff that is {state}")
        self.state = state
        self.event = event


def can(state: State, event: Event) -> bool:
    return (state, event) in TRANSITIONS


def after(state: State, event: Event) -> State:
    """The state that follows. Raises IllegalTransitionError."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(state, event) from None


def sources(event: Event) -> dict[State, State]:
    """Where `event` may happen and what follows: what a compare-and-set script needs."""
    return {state: to for (state, on), to in TRANSITIONS.items() if on is event}
