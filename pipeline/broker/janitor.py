"""Janitor: ends what the dead have left behind. Runs in every worker and API process; each step is one script.

RQ cannot be the failure detector of a latency system (its heartbeats are minutes); leases of seconds are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from redis import Redis

from pipeline.broker import queue, stream
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.clock import BrokerClock
from pipeline.broker.ledger import Ledger, Record, Role
from pipeline.broker.registry import Registry
from pipeline.errors import EngineError
from pipeline.handoff import TERMINAL
from pipeline.settings import Settings

_log = logging.getLogger(__name__)
_GRACE_MS = 1000.0  # a release between two round trips is not an orphan


class WorkerLostError(EngineError):
    """The worker's lease ended while it took part in a handoff."""

    code = "worker_lost"


@dataclass(frozen=True, slots=True)
class Janitor:
    """`sweep` is safe to run anywhere, any number of times, concurrently."""

    client: Redis
    pages: Redis
    ledger: Ledger
    registry: Registry
    clock: BrokerClock
    settings: Settings

    def sweep(self) -> int:
        """Look at every live handoff and every lease once; returns how many handoffs it had to touch."""
        alive = {replica.name for replica in self.registry.list()}
        touched = sum(self._tend(handoff_id, alive) for handoff_id in self.ledger.live())
        stream.reap(self.pages)
        self._forget_replicas()
        return touched

    def _forget_replicas(self) -> None:
        for name in self.registry.expired():
            queue.tidy(self.client, [f"decode.{name}"])
            self.registry.withdraw(name)

    def _tend(self, handoff_id: str, alive: set[str]) -> bool:
        record = self.ledger.load(handoff_id)
        if record is None:
            self.ledger.release(handoff_id)
            return True
        if self._lost(record, alive) or self._orphaned(record) or self._overdue(record, alive):
            return True
        return self._unreleased(record)

    def _lost(self, record: Record, alive: set[str]) -> bool:
        """A participant whose lease has ended leaves by our hand; D's death ends the handoff."""
        roles: tuple[Role, ...] = ("prefill", "decode")
        lost = [role for role in roles if (name := record.worker(role)) and name not in alive]
        for role in lost:
            error = ErrorInfo.of(WorkerLostError(f"{role} worker {record.worker(role)} is gone"))
            attempt = record.number(f"{role}_attempt")
            _log.warning("handoff %s: %s", record.handoff_id, error.message)
            if role == "decode":
                self.ledger.fail(record.handoff_id, error, attempt)
            self.ledger.leave(record.handoff_id, role, attempt, error=error)
        return bool(lost)

    def _orphaned(self, record: Record) -> bool:
        """Nobody works for an API process that is gone."""
        if record.state in TERMINAL or self.ledger.owned(record):
            return False
        self.ledger.cancel(record.handoff_id, "owner-gone")
        return True

    def _overdue(self, record: Record, alive: set[str]) -> bool:
        """Past its total deadline, or waiting for a decode replica that is dead."""
        if record.state in TERMINAL:
            return False
        age_s = (self.clock.now_ms() - float(record.fields["at_created"])) / 1000
        dead = record.worker("decode") is None and record.route["decode_replica"] not in alive
        if age_s <= self.settings.handoff.total_s and not dead:
            return False
        code, message = ("no_replica", "the decode replica is gone") if dead else ("deadline_exceeded", "took too long")
        self.ledger.fail(record.handoff_id, ErrorInfo(code, message, retryable=True, http_status=503 if dead else 504))
        return True

    def _unreleased(self, record: Record) -> bool:
        """Ended and deserted, but the last worker out died before it could release."""
        if record.state not in TERMINAL or record.worker("prefill") or record.worker("decode"):
            return False
        if self.clock.now_ms() - float(record.fields["at_created"]) < _GRACE_MS:
            return False
        self.ledger.release(record.handoff_id)
        return True
