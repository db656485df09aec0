"""Operator: what a person may see of a running system and ask of it. One view for the CLI, the API's pages and doctor.

Everything comes from the broker, so it works while no API is up. No prompt text passes here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from redis import Redis

from pipeline.broker import keys, stream, tally
from pipeline.broker.address import Address
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import ServerInfo, server_info, translate
from pipeline.broker.credit import BudgetGauges
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.registry import Registry, Replica
from pipeline.broker.tally import Tally
from pipeline.errors import CrossfillError
from pipeline.handoff import State
from pipeline.settings import Settings

RECENT = 50  # ended handoffs in a list
_PROBE_TTL_MS = 10_000


class Link(NamedTuple):
    """What a round trip and a megabyte cost from here."""

    round_trip_ms: float
    write_mb_s: float
    read_mb_s: float


class PagesView(NamedTuple):
    """A page server beside the control broker, and who takes pages from it. `gauges` None: no answer, see `error`."""

    address: Address
    replicas: list[str]
    info: ServerInfo | None
    gauges: BudgetGauges | None
    error: str = ""

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        gauges = {"up": False, "error": self.error} if self.gauges is None else {"up": True, **self.gauges._asdict()}
        return {**self.address._asdict(), "replicas": self.replicas, **gauges}


class Operator:
    """Bound to the control broker. Every call raises BrokerError when it is away."""

    def __init__(self, client: Redis, settings: Settings, clock: BrokerClock | None = None) -> None:
        self._client = client
        self._clock = clock or BrokerClock(client)
        self._pages = PageServers(client, settings.broker)
        self._ledger = Ledger(client, self._pages, self._clock, settings)
        self._registry = Registry(client)

    def replicas(self) -> list[Replica]:
        """Those alive, by name."""
        return self._registry.list()

    def budget(self) -> BudgetGauges:
        return stream.gauges(self._client)

    def pages(self, replicas: Iterable[Replica]) -> list[PagesView]:
        """The page servers that `replicas` advertise, by URL. One whose own replica does not reach it is not tried."""
        users: dict[Address, list[Replica]] = {}
        for replica in replicas:
            if replica.pages is not None:
                users.setdefault(replica.pages, []).append(replica)
        return [self._look(address, users[address]) for address in sorted(users)]

    def _look(self, address: Address, users: Sequence[Replica]) -> PagesView:
        names = [replica.name for replica in users]
        if all(replica.load.get("page_server_down") for replica in users):
            return PagesView(address, names, None, None, f"{', '.join(names)} cannot reach it")
        try:
            server = self._pages.at(address)
            return PagesView(address, names, server_info(server), stream.gauges(server))
        except CrossfillError as error:
            return PagesView(address, names, None, None, str(error))

    def queues(self, names: Iterable[str] = ()) -> dict[str, Tally]:
        """Jobs by where they are, in the queues `names` and in every other one that ever had a job, by name."""
        return tally.tallies(self._client, sorted({*names, *tally.known(self._client)}))

    def handoffs(self, recent: int = RECENT) -> list[dict[str, Any]]:
        """Traces: live ones first, the newest first, then those that ended lately. `live` tells them apart."""
        live = self._ledger.traces(self._ledger.live()[::-1])
        ids = {trace["handoff_id"] for trace in live}
        ended = [trace for trace in self._ledger.recent(recent) if trace["handoff_id"] not in ids]
        return [trace | {"live": True} for trace in live] + [trace | {"live": False} for trace in ended]

    def live(self) -> int:
        """Handoffs not yet released."""
        return len(self._ledger.live())

    def handoff(self, handoff_id: str) -> dict[str, Any] | None:
        """The trace of one handoff, live or ended lately; None when nothing is known of it."""
        found = self._ledger.trace(handoff_id)
        if found is not None:
            return found | {"live": handoff_id in self._ledger.live()}
        ended = self._ledger.ended(handoff_id)
        return ended and ended | {"live": False}

    def cancel(self, handoff_id: str) -> State | None:
        """Ask for the end of a handoff. Returns the state that followed, None when nothing is known of it."""
        return self._ledger.cancel(handoff_id, "operator")

    def capture(self, handoff_id: str) -> State | None:
        """Ask D to store a live handoff. Returns its state, a terminal one where it is too late, None when unknown."""
        return self._ledger.capture(handoff_id)

    def drain(self, name: str, *, undo: bool = False) -> bool:
        """Want a replica to take nothing new, or take that back. False: no such replica is alive."""
        return self._registry.drain(name, undo=undo)

    def now_ms(self) -> float:
        """The broker's clock, which all `_ms` stamps here are of."""
        return self._clock.now_ms()

    def server(self) -> ServerInfo:
        return server_info(self._client)

    def skew_ms(self, wall_clock_ms: float) -> float:
        """How far `wall_clock_ms`, read here right now, is ahead of the broker's clock."""
        with translate():
            seconds, microseconds = self._client.time()
        return wall_clock_ms - (seconds * 1000 + microseconds / 1000)

    def link(self, name: str, value_bytes: int, rounds: int = 5) -> Link:
        """Time PING, SET and GET of `value_bytes`; the quickest of `rounds` counts. `name` must be unique."""
        key, value = keys.probe(name), bytes(value_bytes)
        try:
            with translate():
                trip_s = min(_seconds(self._client.ping) for _ in range(rounds))
                write_s = min(_seconds(self._client.set, key, value, px=_PROBE_TTL_MS) for _ in range(rounds))
                read_s = min(_seconds(self._client.get, key) for _ in range(rounds))
        finally:
            with translate():
                self._client.unlink(key)
        return Link(trip_s * 1000, value_bytes / write_s / 1e6, value_bytes / read_s / 1e6)


def _seconds(call: Any, *arguments: Any, **options: Any) -> float:
    start = time.perf_counter()
    call(*arguments, **options)
    return time.perf_counter() - start
