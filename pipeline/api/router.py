"""Router: where the prompts of one API process go, and what it has learned of how long each way takes.

`routing` says which ways there are, `cost` how long each one takes, `affinity` who holds which prefix. A request that
names its route, or the policy `handoff`, leaves nothing to learn from. Called from many threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import cost, prefix, routing
from pipeline.affinity import Affinity
from pipeline.api.relay import Model
from pipeline.broker.registry import Replica
from pipeline.cost import CostModel, Estimate, Outcome, Way
from pipeline.errors import CrossfillError
from pipeline.page import PAGE_TOKENS
from pipeline.request import Request
from pipeline.routing import Route, Wish
from pipeline.settings import RoutingSettings

FRESH_S = 0.25  # how long a reading of the registry serves; leases and loads change twice a second
_CLEAN = ("resent", "taken_over", "recomputed")  # what went a way that was not chosen teaches nothing of it


@dataclass(frozen=True, slots=True)
class Chosen:
    """A route, the replica that decodes, and what was known when it was chosen."""

    route: Route
    decoder: Replica
    keys: Sequence[bytes] = ()  # content addresses of the prompt's whole pages
    estimates: Sequence[Estimate] = ()  # what was compared, the chosen way among it; empty where nothing was

    def explain(self) -> list[Mapping[str, object]]:
        """For people: the chosen way first."""
        way = Way(self.route.prefill_engine, self.route.decode_replica)
        best = next((estimate for estimate in self.estimates if estimate.way == way), None)
        return cost.explain(self.estimates, best) if best else []


class Router:
    """`route` a prompt, tell of its `began` and `ended`, and `learn` from its trace."""

    def __init__(
        self,
        read: Callable[[], list[Replica]],
        settings: RoutingSettings,
        engines: Collection[str] = (),
        digests: Collection[str] = (),
    ) -> None:
        """`read` asks the registry, and what it raises comes out. `engines` are known before they were ever seen;
        `digests` those of every contract served here: a replica of one of them is no faulty replica of another."""
        self._read = read
        self._learns = settings.policy == "cost"
        self._engines = set(engines)
        self._digests = frozenset(digests)
        self._alive: set[str] = set()  # processes of the last reading
        self._costs = CostModel()
        self._affinity = Affinity()
        self._pending: Counter[str] = Counter()  # decode replica -> handoffs of ours that have not ended
        self._lock = threading.Lock()
        self._fleet: list[Replica] = []
        self._read_at = -FRESH_S

    @property
    def fresh(self) -> bool:
        """Whether the registry was read a moment ago."""
        return time.monotonic() - self._read_at < FRESH_S

    def fleet(self, *, fresh: bool = False) -> list[Replica]:
        """Replicas alive a moment ago, or now where `fresh`. Raises BrokerError."""
        if fresh or not self.fresh:
            now = time.monotonic()
            found = self._read()
            with self._lock:
                self._fleet, self._read_at = found, now
                self._engines |= {replica.engine for replica in found}
                if (alive := {_holder(replica) for replica in found}) != self._alive:
                    self._alive = alive
                    self._affinity.forget(alive)
                    self._costs.forget({replica.name for replica in found})
        return self._fleet

    def candidates(self, model: Model, *, fresh: bool = False) -> list[Replica]:
        """The fleet without the replicas of other models that are served here. Raises BrokerError."""
        return self._ours(self.fleet(fresh=fresh), model)

    def _ours(self, fleet: Sequence[Replica], model: Model) -> list[Replica]:
        others = self._digests - {model.contract.digest}
        return [replica for replica in fleet if replica.contract.digest not in others]

    def route(self, request: Request, wish: Wish, model: Model) -> Chosen:
        """Raises what `routing.choose` does.

        What a reading of a moment ago refuses may have registered since: it is asked once more.
        """
        try:
            return self._route(self.candidates(model), request, wish, model)
        except CrossfillError:
            return self._route(self.candidates(model, fresh=True), request, wish, model)

    def route_seen(self, request: Request, wish: Wish, model: Model) -> Chosen:
        """The same by the last reading as it is: nothing is asked of the broker."""
        return self._route(self._ours(self._fleet, model), request, wish, model)

    @property
    def learns(self) -> bool:
        """Whether traces are of any use here."""
        return self._learns

    @property
    def live(self) -> int:
        """Handoffs that began here and have not ended."""
        with self._lock:
            return sum(self._pending.values())

    def began(self, route: Route) -> None:
        with self._lock:
            self._pending[route.decode_replica] += 1

    def ended(self, route: Route) -> None:
        with self._lock:
            self._pending[route.decode_replica] -= 1
            if not self._pending[route.decode_replica]:  # names that never come back must not add up
                del self._pending[route.decode_replica]

    def learn(self, chosen: Chosen, trace: Mapping[str, Any]) -> None:
        """A handoff has finished; `trace` is the ledger's."""
        outcome = _outcome(chosen, trace)
        with self._lock:
            self._affinity.note(_holder(chosen.decoder), chosen.keys)
            if outcome is not None:
                self._costs.observe(outcome)

    def explain(self, model: Model, tokens: int) -> list[Mapping[str, object]]:
        """What every way would cost a prompt of `tokens` that nobody holds. Raises BrokerError."""
        fleet = self.fleet()
        found = routing.ways(fleet, model.contract, tokens, Wish(), pending=self._pending)
        with self._lock:
            estimates = self._estimates(found, fleet, model, tokens, ())
        known = [estimate for estimate in estimates if estimate.known]
        best = min(known or estimates, key=lambda e: e.total_ms, default=None)
        return cost.explain(estimates, best) if best else []

    def _route(self, fleet: list[Replica], request: Request, wish: Wish, model: Model) -> Chosen:
        tokens, needs, pending = len(request.token_ids), request.sampling.needs, self._pending
        route = routing.choose(fleet, model.contract, tokens, wish, known=self._engines, pending=pending, needs=needs)
        replicas = {replica.name: replica for replica in fleet}
        keys = _keys(request, model) if self._learns else ()
        if not self._learns or wish.local or wish.prefill:
            return Chosen(route, replicas[route.decode_replica], keys)
        with self._lock:
            holders = [r.name for r in fleet if self._affinity.held_tokens(_holder(r), keys)]
            found = routing.ways(fleet, model.contract, tokens, wish, pending=pending, needs=needs, prefer=holders)
            estimates = self._estimates(found, fleet, model, tokens, keys)
            best = self._costs.choose(self._whole(estimates, replicas, tokens, keys) or estimates)
        route = found[estimates.index(best)]
        return Chosen(route, replicas[route.decode_replica], keys, estimates)

    def _whole(
        self, estimates: Sequence[Estimate], replicas: Mapping[str, Replica], tokens: int, keys: Sequence[bytes]
    ) -> list[Estimate]:
        """Ways without a prefill job where D holds every whole page before the last token, which it computes anyway:
        less than a page is left, and no other way can be faster."""
        needed = (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
        local = [estimate for estimate in estimates if estimate.way.prefill is None]
        holds = (self._affinity.held_tokens(_holder(replicas[e.way.decode]), keys) for e in local)
        return [e for e, held in zip(local, holds, strict=True) if needed and held >= needed]

    def _estimates(
        self, found: Sequence[Route], fleet: Sequence[Replica], model: Model, tokens: int, keys: Sequence[bytes]
    ) -> list[Estimate]:
        replicas = {replica.name: replica for replica in fleet}
        token_bytes = model.contract.page_shape.page_bytes // PAGE_TOKENS
        made = []
        for route in found:
            held = self._affinity.held_tokens(_holder(replicas[route.decode_replica]), keys)
            way = Way(route.prefill_engine, route.decode_replica)
            ahead = _ahead(route, fleet)
            made.append(self._costs.estimate(way, tokens, min(held, tokens - 1), token_bytes, ahead))
        return made


def _ahead(route: Route, fleet: Sequence[Replica]) -> float:
    """Prompts per replica in front of this one, where it would be computed."""
    if route.prefill_engine is None:
        computing = [replica for replica in fleet if replica.name == route.decode_replica]
    else:
        computing = [r for r in fleet if r.engine == route.prefill_engine and r.role in ("prefill", "both")]
    return sum(replica.load.get("prefill_running", 0) for replica in computing) / max(1, len(computing))


def _outcome(chosen: Chosen, trace: Mapping[str, Any]) -> Outcome | None:
    """None where marks are missing, or the handoff went another way than the chosen one."""
    at = trace["marks_ms"]
    local = chosen.route.prefill_engine is None
    start, end = ("admitted", "first_token") if local else ("prefill_started", "prefill_ended")
    if any(trace.get(name) for name in _CLEAN) or not {start, end, "first_token"} <= at.keys():
        return None
    tokens = trace["prompt_tokens"]
    return Outcome(
        Way(chosen.route.prefill_engine, chosen.route.decode_replica),
        computed_tokens=tokens - trace["reused_tokens"] if local else tokens,
        moved_bytes=0 if local else trace["pages"] * chosen.decoder.contract.page_shape.page_bytes,
        prefill_ms=at[end] - at[start],
        exposed_ms=max(0.0, at["first_token"] - at[end]),
    )


def _keys(request: Request, model: Model) -> Sequence[bytes]:
    whole = len(request.token_ids) // PAGE_TOKENS * PAGE_TOKENS
    return prefix.chain(prefix.seed(model.contract.digest, request.salt), request.token_ids[:whole])


def _holder(replica: Replica) -> str:
    """A process: another one under the same name holds nothing of what it held."""
    return f"{replica.name}@{replica.started_ms}"
