"""Dispatch: which jobs a handoff gets, at first and again when a worker or a transfer is lost.

Rules: (1) the record and the jobs change in one transaction; (2) a job is for the attempt that was dispatched last,
and is begun once: old ones that turn up later find nothing to do; (3) a new attempt fences the one before it at once,
whether or not that one is dead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial

from redis import Redis
from redis.client import Pipeline

from pipeline import request as requests
from pipeline import routing, tracing
from pipeline.broker import queue
from pipeline.broker.address import Address
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.ledger import Change, Ledger
from pipeline.broker.queue import DECODE_JOB, PREFILL_JOB, JobSpec
from pipeline.broker.record import LOST, Record, Role
from pipeline.broker.registry import Registry, Replica
from pipeline.broker.scripts import Step
from pipeline.broker.stamp import Stamps
from pipeline.contract import Contract
from pipeline.errors import NoReplicaError, QuarantinedError
from pipeline.handoff import Attempts, Event
from pipeline.request import Request
from pipeline.routing import Route
from pipeline.settings import Settings


@dataclass(frozen=True)
class Dispatch:
    """Bound to the control broker. All of it may be called anywhere, any number of times, concurrently."""

    client: Redis
    ledger: Ledger
    registry: Registry
    settings: Settings

    @cached_property
    def stamps(self) -> Stamps:
        return Stamps(self.client, self.settings.broker)

    def knows(self, route: Route, model: str) -> bool:
        """Whether an `opening` for them asks the broker nothing."""
        return all(self.stamps.has(spec) for spec in jobs("", route, model))

    def opening(
        self,
        request: Request,
        contract: Contract,
        route: Route,
        owner: str,
        model: str,
        *,
        owner_ttl_s: float = 0.0,
        within_s: float | None = None,
    ) -> Step:
        """The step that writes the record of a new handoff and queues its jobs; `owner` lives for `owner_ttl_s` more.

        Run later than `within_s` from now it does nothing, and replies 0. Raises BrokerError.
        """
        specs = jobs(request.handoff_id, route, model)
        queued = [command for spec in specs for command in self.stamps.commands(spec)]
        traceparent = tracing.current()
        return self.ledger.opening(request, contract, asdict(route), owner, queued, traceparent, owner_ttl_s, within_s)

    def resend(self, handoff_id: str, attempts: Attempts, error: ErrorInfo, *, elsewhere: bool = False) -> bool:
        """P's attempt has failed by `error`: queue another one. D keeps what it has, and says anew what it wants.

        False when no retry is left or no prefill replica but D is alive (`elsewhere`: of another engine than before).
        Raises QuarantinedError, BrokerError.
        """

        def change(record: Record) -> Change | None:
            if (record.attempt("prefill"), record.attempt("decode")) != (attempts.prefill, attempts.decode):
                return None
            self._require_harmless(record)
            route = self._resent(record, elsewhere)
            if route is None or record.number("resent") >= self.settings.handoff.retries:
                return None
            fields: dict[str, str | int] = {
                "route": _encode(route),
                "prefill_attempt": attempts.prefill + 1,
                "resent": record.number("resent") + 1,
                "resent_for": error.code,
            }
            specs = jobs(handoff_id, route, self._model(route))[1:]
            return Change(fields, ("prefill_worker", "prefill_error"), partial(self._enqueue, specs))

        return self.ledger.reassign(handoff_id, Event.RESEND, change)

    def take_over(self, handoff_id: str, attempt: int, lost: Mapping[Role, str]) -> bool:
        """D's `attempt` is lost: another replica goes on from the last token that was emitted, with a P of its own.

        `lost` names the workers that died. False when another caller was quicker, or it has ended meanwhile.
        Raises NoReplicaError (nobody can go on, or no retry is left), QuarantinedError, BrokerError.
        """

        before: list[Address | None] = []  # where the lost D's pages crossed, if the next one's cross elsewhere

        def change(record: Record) -> Change | None:
            if record.attempt("decode") != attempt:
                return None
            sampling = record.request.sampling
            tokens = len(record.request.token_ids) + sampling.max_tokens - 1
            route = routing.take_over(self.registry.list(), record.contract, tokens, _route(record), sampling.needs)
            deaths = {f"{LOST}{role}_{record.attempt(role)}": worker for role, worker in lost.items()}
            self._require_harmless(record, deaths)
            if record.number("taken_over") >= self.settings.handoff.retries:
                raise NoReplicaError(f"it was taken over {record.number('taken_over')} times already")
            decoder = self._replica(route.decode_replica)
            if decoder is None:
                raise NoReplicaError(f"decode replica {route.decode_replica} has just ended")
            before[:] = [] if decoder.pages == record.page_server else [record.page_server]
            return self._taken_over(record, route, decoder, deaths)

        done = self.ledger.reassign(handoff_id, Event.TAKEOVER, change)
        if done and before:
            self.ledger.pages.release(before[0], handoff_id)
        return done

    def _taken_over(self, record: Record, route: Route, decoder: Replica, deaths: dict[str, str]) -> Change:
        prefill_attempt = record.attempt("prefill") + 1
        fields: dict[str, str | int] = {
            "route": _encode(route),
            "request": requests.encode(replace(record.request, first_token=decoder.needs_first_token)),
            "resumed": record.number("tokens"),
            "decode_attempt": record.attempt("decode") + 1,
            "prefill_attempt": prefill_attempt,
            "taken_over": record.number("taken_over") + 1,
            "lost_workers": record.lost_with(deaths),
            **deaths,
        }
        if route.prefill_queue is None:
            fields["prefill_begun"] = f"{prefill_attempt}."  # what is still queued for P finds nothing to do
        drop = ("prefill_worker", "prefill_error", "decode_worker", "decode_error", "recomputed", "page_server")
        specs = jobs(record.handoff_id, route, decoder.model)
        return Change(fields, drop, partial(self._enqueue, specs))

    def _require_harmless(self, record: Record, deaths: Mapping[str, str] | None = None) -> None:
        lost = record.lost_with(deaths or {})
        if lost >= self.settings.handoff.quarantine_after:
            raise QuarantinedError(lost)

    def _resent(self, record: Record, elsewhere: bool) -> Route | None:
        tokens = len(record.request.token_ids) + record.resumed
        request = record.request
        drawn = request.sampling.needs if request.first_token else frozenset[str]()
        return routing.resend(
            self.registry.list(), record.contract, tokens, _route(record), elsewhere=elsewhere, drawn=drawn
        )

    def _replica(self, name: str) -> Replica | None:
        return next((replica for replica in self.registry.list() if replica.name == name), None)

    def _model(self, route: Route) -> str:
        replica = self._replica(route.decode_replica)
        return replica.model if replica else ""

    def _enqueue(self, specs: Sequence[JobSpec], pipe: Pipeline) -> None:
        for spec in specs:
            queue.enqueue(pipe, self.client, spec, self.settings.broker)


def jobs(handoff_id: str, route: Route, model: str) -> list[JobSpec]:
    """D's job, then P's where there is one."""
    meta = {"model": model, "route": str(route)}
    found = [JobSpec(route.decode_queue, DECODE_JOB, handoff_id, meta)]
    if route.prefill_queue:
        found.append(JobSpec(route.prefill_queue, PREFILL_JOB, handoff_id, meta))
    return found


def _route(record: Record) -> Route:
    return Route(**record.route)  # type: ignore[arg-type]  # a dictionary's values have one type


def _encode(route: Route) -> str:
    return json.dumps(asdict(route))
