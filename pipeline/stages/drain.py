"""Drain: how a worker takes part in a handoff and, whatever happens, leaves it with nothing held.

`taking_part` is the frame around both stages: enter, do the work, drain, leave. Engine objects are closed by the
stage itself before this module tells the ledger, so "left" always means "device and stream are quiet".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.broker.channel import ErrorInfo
from pipeline.broker.clock import BrokerClock
from pipeline.broker.ledger import Ledger, Record, Role
from pipeline.broker.signals import Signals, Watch
from pipeline.contract import Contract, require_equal
from pipeline.errors import BrokerError, CrossfillError, HandoffCancelledError, PeerError, StaleAttemptError
from pipeline.handoff import Event, IllegalTransitionError
from pipeline.settings import Settings

if TYPE_CHECKING:
    from redis import Redis

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What a worker process brings to every job. `pages` and `blocking` are clients of the page server."""

    worker: str
    contract: Contract
    settings: Settings
    ledger: Ledger
    signals: Signals
    clock: BrokerClock
    pages: Redis
    blocking: Redis


@dataclass(slots=True)
class Part:
    """One worker's part in one handoff. `fields` are marks and counters, written when it leaves at the latest."""

    services: Services
    role: Role
    attempt: int
    record: Record
    watch: Watch
    fields: dict[str, str | int | float] = field(default_factory=dict)

    @property
    def handoff_id(self) -> str:
        return self.record.handoff_id

    def mark(self, name: str) -> None:
        """Note the broker's time once; the first time counts."""
        self.fields.setdefault(f"at_{name}", round(self.services.clock.now_ms(), 3))

    def flush(self) -> None:
        """Write what was noted so far."""
        self.services.ledger.mark(self.handoff_id, self.role, self.attempt, self.fields)

    def check(self) -> None:
        """Raise when the work is to end: cancelled or over; for D also when P has failed."""
        self.watch.check()
        if self.role == "decode" and (error := self.watch.error("prefill")) is not None:
            raise PeerError(f"prefill failed: {error.message}")


@contextlib.contextmanager
def taking_part(services: Services, handoff_id: str, role: Role) -> Iterator[Part]:
    """Enter, yield the part, leave. Raises what the work raised, after the ledger knows of it.

    HandoffCancelledError when the handoff is gone, over, or its API process is dead.
    """
    with services.signals.watch(handoff_id) as watch:
        attempt, record = services.ledger.enter(handoff_id, role, services.worker)
        part = Part(services, role, attempt, record, watch)
        try:
            _require_owner(services, record)
            require_equal(services.contract, record.contract)
            yield part
        except (HandoffCancelledError, StaleAttemptError):
            _drained(part)
            raise
        except Exception as error:
            _failed(part, error)
            raise
        services.ledger.leave(handoff_id, role, attempt, fields=part.fields)


def _require_owner(services: Services, record: Record) -> None:
    if not services.ledger.owned(record):
        services.ledger.cancel(record.handoff_id, "owner-gone")
        raise HandoffCancelledError(f"the API process that owns handoff {record.handoff_id} is gone")


def _drained(part: Part) -> None:
    ledger = part.services.ledger
    with contextlib.suppress(HandoffCancelledError, StaleAttemptError, IllegalTransitionError):
        ledger.advance(part.handoff_id, part.role, part.attempt, Event.DRAIN)
    ledger.leave(part.handoff_id, part.role, part.attempt, fields=part.fields)


def _failed(part: Part, error: Exception) -> None:
    """P's failure is D's to judge (it may compute the prompt itself); D's failure ends the handoff."""
    info, ledger = ErrorInfo.of(error), part.services.ledger
    if not isinstance(error, CrossfillError):
        _log.exception("handoff %s: %s stage", part.handoff_id, part.role)
    with contextlib.suppress(BrokerError):
        if part.role == "decode":
            ledger.fail(part.handoff_id, info, part.attempt)
            ledger.leave(part.handoff_id, part.role, part.attempt, fields=part.fields)
        else:
            ledger.leave(part.handoff_id, part.role, part.attempt, error=info, fields=part.fields)
