"""`crossfill capture ID`: have D store a live handoff when it ends, whatever its settings say of others."""

from __future__ import annotations

import argparse

from pipeline.broker.operator import Operator
from pipeline.cli import view
from pipeline.errors import CaptureError, HandoffUnknownError
from pipeline.handoff import TERMINAL


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("capture", help="store a live handoff as a file, on the machine that decodes it")
    command.add_argument("id", help="32 hex digits, as `crossfill handoffs` shows them")
    view.add_broker_flags(command)
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> None:
    with view.operator(options) as operator:
        print(ask(operator, options.id))


def ask(operator: Operator, handoff_id: str) -> str:
    """What will happen. Raises HandoffUnknownError, CaptureError when it has ended."""
    known = operator.handoff(handoff_id)
    state = operator.capture(handoff_id) if known else None
    if known is None or (state is None and known["live"]):
        raise HandoffUnknownError(handoff_id)
    if state is None or state in TERMINAL:
        raise CaptureError(
            f"handoff {handoff_id} has ended: only a live one can still be captured; capture.mode in the settings of "
            f"the decode workers stores others like it"
        )
    replica = known["route"].get("decode_replica") or "its decode worker"
    return f"handoff {handoff_id} ({state}): {replica} writes it into its capture folder when it ends"
