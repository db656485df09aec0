"""Drain: how a worker takes part in a handoff and, whatever happens, leaves it with nothing held.

`taking_part` is the frame around both stages: enter, do the work, drain, leave. Engine objects are closed by the
stage itself before this module tells the ledger, so "left" always means "device and stream are quiet".
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline import prefix
from pipeline.broker.address import Address
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.clock import BrokerClock
from pipeline.broker.dispatch import Dispatch
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.record import Record, Role, Snapshot
from pipeline.broker.signals import Signals, Watch
from pipeline.contract import Contract, require_equal
from pipeline.errors import (
    BrokerError,
    CrossfillError,
    HandoffCancelledError,
    PeerError,
    StaleAttemptError,
    WorkerLostError,
)
from pipeline.handoff import Event, IllegalTransitionError, State
from pipeline.metrics import Metrics
from pipeline.request import Request
from pipeline.settings import Settings
from pipeline.stages.observe import Observer
from pipeline.stages.share import ImportShare

T = TypeVar("T")
INSIST_S = 120.0
_RETRY_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What a worker process brings to every job. `pages` are the page servers; `address` that of this replica as D.

    `resigned` asks whether this worker's engine has ended; by the time it says so, the worker has given up its lease.
    """

    worker: str
    contract: Contract
    settings: Settings
    ledger: Ledger
    dispatch: Dispatch
    signals: Signals
    clock: BrokerClock
    pages: PageServers
    address: Address | None = None
    observer: Observer = field(default_factory=lambda: Observer(Metrics("worker")))
    share: ImportShare = field(default_factory=ImportShare)
    resigned: Callable[[], bool] = lambda: False


class PrefillFailedError(PeerError):
    """P's last attempt failed, or its worker died: `cause` says how."""

    def __init__(self, cause: ErrorInfo) -> None:
        super().__init__(f"prefill failed: {cause.message}")
        self.cause = cause


@dataclass(slots=True)
class Part:
    """One worker's part in one handoff. `fields` are marks and counters, written when it leaves at the latest.

    `request` is the client's, continued by what was answered before this attempt.
    """

    services: Services
    role: Role
    attempt: int
    record: Record
    request: Request
    watch: Watch
    fields: dict[str, str | int | float] = field(default_factory=dict)

    @property
    def handoff_id(self) -> str:
        return self.record.handoff_id

    def addresses(self) -> tuple[list[bytes], bytes]:
        """Content address of every page that is transferred, and of the whole prompt: what P and D must agree on."""
        request = self.request
        start = prefix.seed(self.services.contract.digest, request.salt)
        keys = prefix.chain(start, request.token_ids[: request.transfer_tokens])
        return keys, prefix.prompt_digest(start, request.token_ids)

    def mark(self, name: str) -> None:
        """Note the broker's time once; the first time counts."""
        self.fields.setdefault(f"at_{name}", round(self.services.clock.now_ms(), 3))

    def flush(self) -> None:
        """Write what was noted so far."""
        self.services.ledger.mark(self.handoff_id, self.role, self.attempt, self.fields)

    def check(self) -> None:
        """Raise when the work is to end: cancelled or over; for P also when D needs no page of it any more."""
        self.watch.check()
        seen = self.watch.snapshot
        if self.role == "prefill" and seen is not None:
            require_wanted(seen)

    def require_prefill(self) -> None:
        """D, where nothing comes: raise PeerError when P's last attempt has failed."""
        seen = self.watch.snapshot
        if seen is not None and (error := seen.error("prefill")) is not None:
            raise PrefillFailedError(error)


def require_wanted(seen: Snapshot) -> None:
    """Raise StaleAttemptError when D has every page, or computes the prompt itself."""
    if seen.recomputed or seen.state in (State.COMMITTED, State.DECODING):
        raise StaleAttemptError(f"handoff {seen.handoff_id} needs no page of this prefill any more")


@contextlib.contextmanager
def taking_part(services: Services, handoff_id: str, role: Role) -> Iterator[Part]:
    """Enter, yield the part, leave. Raises what the work raised, after the ledger knows of it.

    HandoffCancelledError when the handoff is gone, over, or its API process is dead. When the engine ends, the worker
    leaves as the dead do: by a janitor's hand, so that another one goes on and the death counts.
    """
    dead = services.resigned()
    if dead and role == "decode":
        raise HandoffCancelledError(f"the engine has ended: another decode worker takes handoff {handoff_id}")
    with services.signals.watch(handoff_id) as watch:
        token = secrets.token_hex(8)
        attempt, record = insist(lambda: services.ledger.enter(handoff_id, role, services.worker, token))
        watch.belong(role, attempt)
        part = Part(services, role, attempt, record, record.request, watch)
        part.fields[f"{role}_replica"] = services.worker.rpartition("@")[0]
        try:
            part.request = services.ledger.request_of(record)
            _require_owner(services, record)
            require_equal(services.contract, record.contract)
            yield part
        except (HandoffCancelledError, StaleAttemptError):
            insist(lambda: _drained(part))
            raise
        except Exception as error:
            if dead or not services.resigned():  # what a dead engine never took up is nobody's death
                _failed(part, error)
            raise
        insist(lambda: _leave(part))


def _require_owner(services: Services, record: Record) -> None:
    if not services.ledger.owned(record):
        services.ledger.cancel(record.handoff_id, "owner-gone")
        raise HandoffCancelledError(f"the API process that owns handoff {record.handoff_id} is gone")


def _leave(part: Part, error: ErrorInfo | None = None) -> None:
    part.services.ledger.leave(part.handoff_id, part.role, part.attempt, error=error, fields=part.fields)


def _drained(part: Part) -> None:
    with contextlib.suppress(HandoffCancelledError, StaleAttemptError, IllegalTransitionError):
        part.services.ledger.advance(part.handoff_id, part.role, part.attempt, Event.DRAIN)
    if part.watch.abandoned and part.role == "prefill":  # D would wait; where D itself leaves, the janitor sees it
        _leave(part, ErrorInfo.of(WorkerLostError(f"prefill worker {part.services.worker} was stopped")))
    else:
        _leave(part)


def _failed(part: Part, error: Exception) -> None:
    """P's failure is D's to judge (it may compute the prompt itself); D's failure ends the handoff."""
    info = ErrorInfo.of(error)
    if not isinstance(error, CrossfillError):
        _log.exception("handoff %s: %s stage", part.handoff_id, part.role)
    if part.role == "decode":
        insist(lambda: part.services.ledger.fail(part.handoff_id, info, part.attempt))
        insist(lambda: _leave(part))
    else:
        insist(lambda: _leave(part, info))


def insist(step: Callable[[], T], limit_s: float | None = None) -> T:
    """Repeat an idempotent step while the broker is away: a worker that lives must not look as if it still worked.

    Raises BrokerError after `limit_s`, or INSIST_S: by then the record's TTL ends it.
    """
    deadline = time.monotonic() + (INSIST_S if limit_s is None else limit_s)
    while True:
        try:
            return step()
        except BrokerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
