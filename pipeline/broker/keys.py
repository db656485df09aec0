"""The whole keyspace. No other module spells a key.

Every key of one handoff carries its id as hash tag, so a Cluster keeps them on one node; the budget's global
keys live on the page server, which is standalone by design.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.routing import decode_queue as decode_queue  # RQ's queues are named by a route
from pipeline.routing import prefill_queue as prefill_queue

PREFIX = "cf"

# page server, one each
BUDGET_TOTAL = f"{PREFIX}:budget:total"  # string: bytes in flight
BUDGET_WAITERS = f"{PREFIX}:budget:waiters"  # zset: handoff id -> arrival number
BUDGET_ARRIVALS = f"{PREFIX}:budget:arrivals"  # string: last arrival number
BUDGET_WAITER_LEASES = f"{PREFIX}:budget:waiter-leases"  # zset: handoff id -> Redis TIME ms
BUDGET_LEASES = f"{PREFIX}:budget:leases"  # zset: handoff id -> Redis TIME ms at which its credits are reaped
BUDGET_HELD = f"{PREFIX}:budget:held"  # hash: handoff id -> bytes in flight of it; no TTL, the lease ends it
BUDGET_WANTS = f"{PREFIX}:budget:wants"  # hash: waiting handoff id -> "<bytes> <budget>"

# control broker
LIVE = f"{PREFIX}:live"  # zset: live handoff id -> Redis TIME ms at creation
REPLICAS = f"{PREFIX}:replicas"  # set of replica names ever registered and not yet reaped
DRAINS = f"{PREFIX}:drains"  # hash: replica name -> incarnation that an operator wants to take nothing new
RECENT = f"{PREFIX}:recent"  # list: JSON traces of ended handoffs, capped, no prompt text
SWEEP = f"{PREFIX}:sweep"  # string that expires: somebody has swept within a moment
UPKEEP = f"{PREFIX}:upkeep"  # string that expires: somebody has looked for queues that nobody serves, not long ago
FENCES_PATTERN = f"{PREFIX}:{{*}}:fence"  # every handoff that a page server knows of
EVENTS_PATTERN = f"{PREFIX}:{{*}}:events"  # every worker hears all of them: a few short messages a handoff


@dataclass(frozen=True, slots=True)
class HandoffKeys:
    """Keys of one handoff."""

    handoff_id: str

    def _key(self, name: str) -> str:
        return f"{PREFIX}:{{{self.handoff_id}}}:{name}"

    @property
    def record(self) -> str:
        return self._key("record")  # hash: the ledger's record

    @property
    def events(self) -> str:
        return self._key("events")  # pub/sub channel: started, accept, cancel, ended

    @property
    def tokens(self) -> str:
        return self._key("tokens")  # list: the token log

    @property
    def notify(self) -> str:
        return self._key("notify")  # pub/sub channel: the same entries, as they come

    @property
    def stream(self) -> str:
        return self._key("stream")  # stream: frame headers

    @property
    def credits(self) -> str:
        return self._key("credits")  # hash: "<prefill_attempt>.<decode_attempt>.<sequence>" -> bytes

    @property
    def fence(self) -> str:
        return self._key("fence")  # string: "<prefill_attempt>.<decode_attempt>" that may write

    @property
    def wake(self) -> str:
        return self._key("wake")  # list: a waiter for credit sleeps on it

    @property
    def payload_prefix(self) -> str:
        return self._key("page:")  # + a field of `credits`: string: one frame's payload

    def payload(self, attempts: str, sequence: int) -> str:
        return f"{self.payload_prefix}{attempts}.{sequence}"


def handoff_of(key: str) -> str:
    """The id in a key or channel of a handoff."""
    return key[key.index("{") + 1 : key.index("}")]


def replica(name: str) -> str:
    return f"{PREFIX}:replica:{name}"  # hash with PX: the registry's record; its expiry is the lease's end


def probe(name: str) -> str:
    return f"{PREFIX}:probe:{name}"  # string with PX: what `crossfill doctor` times a link with


def owner(api_id: str) -> str:
    return f"{PREFIX}:owner:{api_id}"  # string with PX: an API process is alive
