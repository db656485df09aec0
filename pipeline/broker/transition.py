"""Transition: one step of a handoff's life, as scripts are asked for it and as they answer."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import HandoffCancelledError, StaleAttemptError
from pipeline.handoff import TERMINAL, Event, IllegalTransitionError, State, sources

Fields = Mapping[str, str | int | float]


def table(event: Event) -> str:
    """From which state to which, for a script: `a:b,c:d`."""
    return ",".join(f"{a}:{b}" for a, b in sources(event).items())


def flat(fields: Fields) -> list[str | int | float]:
    """Names and values in turn, as a script's last arguments."""
    return [item for pair in fields.items() for item in pair]


def answer(raw: list[bytes]) -> tuple[str, State | None]:
    """A script's status, and the state that the handoff is in; None when it is gone."""
    return raw[0].decode(), State(raw[1].decode()) if raw[1] else None


def require(handoff_id: str, status: str, state: State | None, event: Event) -> None:
    """Raises StaleAttemptError, HandoffCancelledError (it has ended or is ending), IllegalTransitionError."""
    if status == "ok":
        return
    if status == "stale":
        raise StaleAttemptError(f"handoff {handoff_id} is in the hands of a newer attempt")
    if state is None or state in TERMINAL or state in (State.CANCELLING, State.DRAINING):
        raise HandoffCancelledError(f"handoff {handoff_id} is {state or 'gone'}")
    raise IllegalTransitionError(state, event)
