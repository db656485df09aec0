"""Janitor: ends what the dead have left behind. Runs in every worker and API process; each step is one script.

RQ cannot be the failure detector of a latency system (its heartbeats are minutes); leases of seconds are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from redis import Redis
from redis.exceptions import OutOfMemoryError

from pipeline import routing
from pipeline.broker import keys, queue, stream
from pipeline.broker import record as records
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import translate
from pipeline.broker.dispatch import Dispatch
from pipeline.broker.ledger import Ledger
from pipeline.broker.record import LOST, ROLES, Role, Snapshot
from pipeline.broker.registry import Registry
from pipeline.broker.scripts import Scripts
from pipeline.broker.transition import Fields
from pipeline.errors import CrossfillError, DeadlineError, NoReplicaError, QuarantinedError, WorkerLostError
from pipeline.handoff import TERMINAL, State
from pipeline.settings import Settings

_log = logging.getLogger(__name__)
TURN_MS = 800  # less than the pause between two sweeps of one process, which alone must not miss its own turn
_UPKEEP_MS = 30_000  # between two looks for queues that nobody serves
_AT_ONCE = 256  # records read in one round trip
_OVER = TERMINAL | {State.CANCELLING, State.DRAINING}


class Serving(NamedTuple):
    """Queues that somebody alive takes jobs from (one that an operator drains does where no other is), and the names of
    replicas that are being stopped."""

    queues: frozenset[str]
    stopping: frozenset[str]


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

    @property
    def dispatch(self) -> Dispatch:
        return Dispatch(self.client, self.ledger, self.registry, self.settings)

    def sweep_in_turn(self) -> int:
        """`sweep`, unless some process has done so a moment ago: however many there are, all handoffs are looked at
        about once a second. Raises BrokerError."""
        return self.sweep() if self._has_turn(keys.SWEEP, TURN_MS) else 0

    def _has_turn(self, key: str, lasts_ms: int) -> bool:
        with translate():
            try:
                return bool(self.client.set(key, 1, nx=True, px=lasts_ms))
            except OutOfMemoryError:
                return True  # what frees memory does not wait for it

    def sweep(self) -> int:
        """Look at every live handoff and every lease once; returns how many handoffs it had to touch."""
        served = cache(self._serving)  # asked once at most, and only where a prompt waits
        touched = sum(self._tend(handoff_id, served) for handoff_id in self._suspects(self.ledger.live()))
        stream.reap(self.pages)
        self._forget_replicas()
        if self._has_turn(keys.UPKEEP, _UPKEEP_MS):
            self._retire_queues()
        return touched

    def _forget_replicas(self) -> None:
        for name in self.registry.expired():
            queue.tidy(self.client, [keys.decode_queue(name)])
            self.registry.withdraw(name)

    def _retire_queues(self) -> None:
        """Only queues named by our rule, and only of nobody who is alive: an operator's RQ may share the server."""
        ours = {name for name in queue.known(self.client) if routing.is_queue(name)}
        served = {name for replica in self.registry.list() for name in routing.queues(replica)}
        queue.retire(self.client, sorted(ours - served))

    def _serving(self) -> Serving:
        replicas = self.registry.list()
        stopping = frozenset(replica.name for replica in replicas if replica.load.get("stopping"))
        staying = [replica for replica in replicas if replica.name not in stopping]
        return Serving(frozenset(name for replica in staying for name in routing.queues(replica)), stopping)

    def _suspects(self, handoff_ids: Sequence[str]) -> Iterator[str]:
        """Those worth a look of their own, a few round trips each; most are well, which one round trip tells of many.

        Nothing is done upon these readings: what they miss, the next sweep finds.
        """
        lives, owned = cache(self._lives), cache(self._owned)
        for start in range(0, len(handoff_ids), _AT_ONCE):
            part = handoff_ids[start : start + _AT_ONCE]
            for handoff_id, values in zip(part, self._peek(part), strict=True):
                if not self._is_well(handoff_id, values, lives, owned):
                    yield handoff_id

    def _peek(self, handoff_ids: Sequence[str]) -> list[list[str | None]]:
        """The small fields of several records, in one round trip."""
        names = [keys.HandoffKeys(handoff_id).record for handoff_id in handoff_ids]
        with translate():
            raw: bytes = Scripts(self.client).run("glance", names, records.SMALL)
        found = json.loads(raw.decode(errors="replace"))
        return [[None if value is False else value for value in values] for values in found]

    def _owned(self, owner: str) -> bool:
        with translate():
            return bool(self.client.exists(keys.owner(owner)))

    def _is_well(
        self,
        handoff_id: str,
        values: list[str | None],
        lives: Callable[[str], bool],
        owned: Callable[[str], bool],
    ) -> bool:
        """D has begun, nobody is waited for any more, and whoever takes part lives: all that `_settle` looks for."""
        try:
            seen = records.snapshot(handoff_id, values)
            return (
                seen is not None
                and seen.state not in _OVER
                and all(map(seen.begun, _begins(seen)))
                and seen.worker("decode") is not None
                and all(lives(worker) for role in ROLES if (worker := seen.worker(role)))
                and owned(seen.fields["owner"])
                and self._late(seen) is None
            )
        except (KeyError, TypeError, ValueError):  # not readable: `_tend` says so
            return False

    def _tend(self, handoff_id: str, served: Callable[[], Serving]) -> bool:
        """One record that cannot be read (a newer version's, say) must not keep all others waiting: its TTL ends it."""
        try:
            return self._settle(handoff_id, served)
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("the record of handoff %s is not readable: %s: %s", handoff_id, type(error).__name__, error)
            return False

    def _settle(self, handoff_id: str, served: Callable[[], Serving]) -> bool:
        seen = self.ledger.peek(handoff_id)
        if seen is None:
            self.ledger.release(handoff_id)
            return True
        if self._lost(seen) or self._orphaned(seen) or self._overdue(seen) or self._returned(seen, served):
            return True
        return self._stranded(seen, served) or self._unreleased(seen)

    def _lost(self, seen: Snapshot) -> bool:
        """A participant whose lease has ended leaves by our hand. D alone judges the loss of P; for D, another takes
        over."""
        lost = {role: worker for role in ROLES if (worker := seen.worker(role)) and not self._lives(worker)}
        for role, worker in lost.items():
            _log.warning("handoff %s: %s worker %s is gone", seen.handoff_id, role, worker)
        if "decode" in lost and seen.state not in _OVER:
            self._take_over(seen, lost)
        else:
            for role, worker in lost.items():
                self._leave(seen, role, worker)
        return bool(lost)

    def _leave(self, seen: Snapshot, role: Role, worker: str) -> None:
        attempt = seen.attempt(role)
        error = ErrorInfo.of(WorkerLostError(f"{role} worker {worker} is gone"))
        death, record = {f"{LOST}{role}_{attempt}": worker}, self.ledger.load(seen.handoff_id)
        fields: Fields = {**death, "lost_workers": record.lost_with(death) if record else 1}
        self.ledger.leave(seen.handoff_id, role, attempt, error=error, fields=fields)

    def _take_over(self, seen: Snapshot, lost: dict[Role, str]) -> None:
        attempt = seen.attempt("decode")
        try:
            self.dispatch.take_over(seen.handoff_id, attempt, lost)
        except (NoReplicaError, QuarantinedError) as error:
            self.ledger.fail(seen.handoff_id, ErrorInfo.of(_told(error, lost.get("decode"))), attempt)
            for role, worker in lost.items():
                self._leave(seen, role, worker)

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
        """Past a deadline, or left by its decode replica, or waiting for one that will not come."""
        if seen.state in TERMINAL:
            return False
        deserted = seen.state not in _OVER and self._deserted(seen)
        if (error := self._late(seen)) is not None:
            self.ledger.fail(seen.handoff_id, ErrorInfo.of(error))
        elif deserted:
            self._take_over(seen, {})
        return deserted or error is not None

    def _late(self, seen: Snapshot) -> CrossfillError | None:
        limits = self.settings.handoff
        if not seen.begun("decode") and self._age_s(seen, "at_dispatched") > limits.queue_s:
            return DeadlineError(f"no decode worker took the request within {limits.queue_s:g} s")
        if self._age_s(seen, "at_created") > limits.total_s:
            return DeadlineError(f"the request took longer than {limits.total_s:g} s")
        return None

    def _age_s(self, seen: Snapshot, since: str) -> float:
        return (self.clock.now_ms() - float(seen.fields.get(since) or seen.fields["at_created"])) / 1000

    def _deserted(self, seen: Snapshot) -> bool:
        """D has left it unfinished, or will never begin it."""
        if seen.begun("decode"):
            return seen.worker("decode") is None
        return self.registry.holder(str(seen.route["decode_replica"])) is None

    def _returned(self, seen: Snapshot, served: Callable[[], Serving]) -> bool:
        """D is being stopped and will not begin it: to another one, if there is one. Else it may come back in time."""
        if seen.state in _OVER or seen.begun("decode") or seen.route["decode_replica"] not in served().stopping:
            return False
        try:
            return self.dispatch.take_over(seen.handoff_id, seen.attempt("decode"), {})
        except (NoReplicaError, QuarantinedError):
            return False

    def _stranded(self, seen: Snapshot, served: Callable[[], Serving]) -> bool:
        """P's job waits in a queue that nobody alive takes jobs from: D is told, and looks elsewhere."""
        name = seen.route["prefill_queue"]
        if seen.state in _OVER or name is None or seen.begun("prefill"):
            return False
        if name in served().queues:
            return False
        attempt, error = seen.attempt("prefill"), NoReplicaError("no prefill replica of its engine is alive any more")
        fields = {"prefill_begun": f"{attempt}."}
        self.ledger.leave(seen.handoff_id, "prefill", attempt, error=ErrorInfo.of(error), fields=fields)
        return True

    def _unreleased(self, seen: Snapshot) -> bool:
        """Ended and deserted, but the last worker out died before it could release, or is about to: both may."""
        if seen.state not in TERMINAL or any(seen.worker(role) for role in ROLES):
            return False
        self.ledger.release(seen.handoff_id)
        return True


def _begins(seen: Snapshot) -> tuple[Role, ...]:
    """Whose jobs must have been begun before nothing waits."""
    return ROLES if seen.route["prefill_queue"] else ("decode",)


def _told(error: CrossfillError, worker: str | None) -> CrossfillError:
    """What the client reads when nobody can go on in the place of `worker`."""
    if worker is None or isinstance(error, QuarantinedError):
        return error
    return WorkerLostError(f"decode worker {worker} is gone, and nobody can go on in its place: {error}")
