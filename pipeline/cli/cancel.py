"""`crossfill cancel ID`: end a live handoff, and say how it ended."""

from __future__ import annotations

import argparse
import time

from pipeline.broker.operator import Operator
from pipeline.cli import view
from pipeline.errors import DeadlineError, HandoffUnknownError
from pipeline.handoff import TERMINAL, State

_LOOK_S = 0.1


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("cancel", help="end a live handoff")
    command.add_argument("id", help="32 hex digits, as `crossfill handoffs` shows them")
    command.add_argument("--wait", type=float, default=30.0, metavar="SECONDS", help="for its end (default 30)")
    view.add_broker_flags(command)
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> None:
    with view.operator(options) as operator:
        print(cancel(operator, options.id, options.wait))


def cancel(operator: Operator, handoff_id: str, wait_s: float) -> str:
    """One line on the end. Raises HandoffUnknownError, DeadlineError when a worker does not let go of it."""
    known = operator.handoff(handoff_id)
    if known is None:
        raise HandoffUnknownError(handoff_id)
    if State(known["state"]) in TERMINAL:
        return f"handoff {handoff_id} had ended already: {known['state']}"
    operator.cancel(handoff_id)
    deadline = time.monotonic() + wait_s
    while State(state := (operator.handoff(handoff_id) or known | {"state": "cancelled"})["state"]) not in TERMINAL:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"handoff {handoff_id} is still {state} after {wait_s:g} s: `crossfill handoff` says who"
            )
        time.sleep(_LOOK_S)
    return f"handoff {handoff_id}: {state}"
