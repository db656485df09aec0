"""Janitor: ends what the dead have left behind. Runs in every worker and API process; each step is one script.

RQ cannot be the failure detector of a latency system (its heartbeats are minutes); leases of seconds are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from redis import Redis

from pipeline.broker import keys, queue, stream
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.clock import BrokerClock
from pipeline.broker.ledger import Ledger
from pipeline.broker.record import ROLES, Snapshot
from pipeline.broker.registry import Registry
from pipeline.errors import DeadlineError, EngineError, NoReplicaError
from pipeline.handoff import TERMINAL
from pipeline.settings import Settings

_log = logging.getLogger(__name__)
_GRACE_MS = 1000.0  # a release between two round trips is not an orphan


class WorkerLostError(EngineError):
    """The worker's lease ended while it took part in a handoff."""

    code = "worker_lost"


@dataclass(frozen=True, slots=True)
class Janitor:
    """`sweep` is safe to run anywhere, any number of times, concurrently.

    `registry` must hold no replica of its own: forgetting a name is not withdrawing ours.
    """

    client: Redis
    pages: Redis
    ledger: Ledger
    registry: Registry
    clock: BrokerClock
    settings: Settings

    def sweep(self) -> int:
        """Look at every live handoff and every lease once; returns how many handoffs it had to touch."""
        touched = sum(self._tend(handoff_id) for handoff_id in self.ledger.live())
        stream.reap(self.pages)
        self._forget_replicas()
        return touched

    def _forget_replicas(self) -> None:
        for name in self.registry.expired():
            queue.tidy(self.client, [keys.decode_queue(name)])
            self.registry.withdraw(name)

    def _tend(self, handoff_id: str) -> bool:
        """One record that cannot be read (a newer version's, say) must not keep all others waiting: its TTL ends it."""
        try:
            return self._settle(handoff_id)
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("the record of handoff %s is not readable: %s: %s", handoff_id, type(error).__name__, error)
            return False

    def _settle(self, handoff_id: str) -> bool:
        seen = self.ledger.peek(handoff_id)
        if seen is None:
            self.ledger.release(handoff_id)
            return True
        if self._lost(seen) or self._orphaned(seen) or self._overdue(seen):
            return True
        return self._unreleased(seen)

    def _lost(self, seen: Snapshot) -> bool:
        """A participant whose lease has ended leaves by our hand; D's death ends the handoff."""
        lost = [role for role in ROLES if (worker := seen.worker(role)) and not self._lives(worker)]
        for role in lost:
            error = ErrorInfo.of(WorkerLostError(f"{role} worker {seen.worker(role)} is gone"))
            attempt = seen.number(f"{role}_attempt")
            _log.warning("handoff %s: %s", seen.handoff_id, error.message)
            if role == "decode":
                self.ledger.fail(seen.handoff_id, error, attempt)
            self.ledger.leave(seen.handoff_id, role, attempt, error=error)
        return bool(lost)

    def _lives(self, worker: str) -> bool:
        """Asked for each one, right before acting: a replica may have registered since."""
        name, _, incarnation = worker.rpartition("@")  # a replica's name may hold the separator, its incarnation not
        return self.registry.holder(name) == incarnation

    def _orphaned(self, seen: Snapshot) -> bool:
        """Nobody works for an API process that is gone."""
        if seen.state in TERMINAL or self.ledger.owned(seen):
            return False
        self.ledger.cancel(seen.handoff_id, "owner-gone")
        return True

    def _overdue(self, seen: Snapshot) -> bool:
        """Past a deadline, or waiting for a decode replica that is dead."""
        if seen.state in TERMINAL:
            return False
        error = self._late(seen, (self.clock.now_ms() - float(seen.fields["at_created"])) / 1000)
        if error is not None:
            self.ledger.fail(seen.handoff_id, error)
        return error is not None

    def _late(self, seen: Snapshot, age_s: float) -> ErrorInfo | None:
        limits = self.settings.handoff
        waiting = seen.number("decode_attempt") == 0
        if waiting and self.registry.holder(str(seen.route["decode_replica"])) is None:
            return ErrorInfo.of(NoReplicaError("the decode replica is gone"))
        if waiting and age_s > limits.queue_s:
            return ErrorInfo.of(DeadlineError(f"no decode worker took the request within {limits.queue_s:g} s"))
        if age_s > limits.total_s:
            return ErrorInfo.of(DeadlineError(f"the request took longer than {limits.total_s:g} s"))
        return None

    def _unreleased(self, seen: Snapshot) -> bool:
        """Ended and deserted, but the last worker out died before it could release."""
        if seen.state not in TERMINAL or any(seen.worker(role) for role in ROLES):
            return False
        if self.clock.now_ms() - float(seen.fields["at_created"]) < _GRACE_MS:
            return False
        self.ledger.release(seen.handoff_id)
        return True
