"""Registry: which replicas are alive, what they can do and how busy they are.

A record lives as long as its lease: a replica is alive exactly while its key exists, so only the server's clock
counts. A name belongs to one process at a time, told apart by a random incarnation.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from redis import Redis

from pipeline.broker import keys
from pipeline.broker.address import Address
from pipeline.broker.connect import translate
from pipeline.broker.scripts import Scripts
from pipeline.contract import Contract
from pipeline.errors import ConfigError, StaleAttemptError

Names = list[str]  # inside the class `list` is a verb
_log = logging.getLogger(__name__)
_GRACE_S = 0.25  # beyond the old lease's end: a timer's and a round trip's worth


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine process. `stats` are the engine's gauges; `load` counts running jobs: `<role>_running`."""

    name: str
    engine: str
    role: str  # "prefill", "decode" or "both"
    model: str
    contract: Contract
    slots: int
    started_ms: int
    can_prefill: bool = True
    needs_first_token: bool = False
    max_running: int = 16
    kv_tokens: int = 0
    features: frozenset[str] = frozenset()
    pages: Address | None = None  # its own page server; None: pages cross the control broker
    stats: dict[str, int] = field(default_factory=dict)
    load: dict[str, int] = field(default_factory=dict)


def encode(replica: Replica) -> str:
    """The fixed part as JSON; gauges are stored beside it, because only they change."""
    fields = asdict(replica)
    del fields["stats"], fields["load"]
    return json.dumps(fields | {"features": sorted(replica.features)}, sort_keys=True)


def decode(text: str | bytes, stats: str | bytes, load: str | bytes) -> Replica:
    """Raises KeyError, TypeError or ValueError when this is not a replica's record."""
    fields = json.loads(text)
    fields["contract"] = Contract(**fields["contract"])
    fields["features"] = frozenset(fields.get("features", ()))
    fields["pages"] = Address(*fields["pages"]) if fields.get("pages") else None
    return Replica(**fields, stats=json.loads(stats), load=json.loads(load))


class Registry:
    """One process's view; it may register replicas of its own and read those of all."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._scripts = Scripts(client)
        self._incarnation = secrets.token_hex(8)
        self._mine: dict[str, Replica] = {}

    def register(self, replica: Replica, lease_s: float) -> None:
        """Announce a replica that is ready to work, for `lease_s`.

        A crashed predecessor of the same name is waited for until its lease has ended. Raises ConfigError when the
        name is still held after that (its holder lives), BrokerError.
        """
        left_ms = self._take(replica, lease_s)
        if left_ms:
            time.sleep(left_ms / 1000 + _GRACE_S)
            left_ms = self._take(replica, lease_s)
        if left_ms:
            raise ConfigError(f"a replica named {replica.name!r} is alive already: give each worker its own name")
        self._mine[replica.name] = replica

    def heartbeat(self, name: str, stats: Mapping[str, int], load: Mapping[str, int], lease_s: float) -> bool:
        """Renew the lease of a replica registered here; one that the broker lost or let expire is registered again.

        True: an operator wants this replica to take nothing new. Raises StaleAttemptError when another process has
        taken the name meanwhile (stop working), BrokerError.
        """
        args = [self._incarnation, json.dumps(dict(stats)), json.dumps(dict(load)), _ms(lease_s), name]
        with translate():
            answer = self._scripts.run("replica_heartbeat", [keys.replica(name), keys.DRAINS], args)
        if answer == b"gone":
            _log.warning("replica %s had lost its lease: registering it again", name)
            replica = replace(self._mine[name], stats=dict(stats), load=dict(load))
            answer = b"taken" if self._take(replica, lease_s) else b"ok"
        if answer == b"taken":
            raise StaleAttemptError(f"another process has taken over as replica {name!r}")
        return bool(answer == b"drain")

    def drain(self, name: str, *, undo: bool = False) -> bool:
        """Want the living replica `name` to take nothing new (`undo`: take that back); it hears so with its next
        heartbeat and shows `draining` in its load. False: no such replica. A restarted process starts undrained."""
        with translate():
            args = [name, "0" if undo else "1"]
            return bool(self._scripts.run("replica_drain", [keys.replica(name), keys.DRAINS], args))

    def withdraw(self, name: str) -> bool:
        """Remove a replica of this process, or one whose lease has ended; True for the one caller that removed it.

        Another living process's replica stays. Raises BrokerError.
        """
        self._mine.pop(name, None)
        with translate():
            names = [keys.replica(name), keys.REPLICAS, keys.DRAINS]
            return bool(self._scripts.run("replica_withdraw", names, [name, self._incarnation]))

    def list(self) -> list[Replica]:
        """Those alive, by name. A record this version cannot read (of a newer one, say) is left out. BrokerError."""
        names = self._names()
        with translate(), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(keys.replica(name))
            records = pipe.execute()
        found = (_read(name, record) for name, record in zip(names, records, strict=True) if record)
        return [replica for replica in found if replica is not None]

    @property
    def incarnation(self) -> str:
        """What tells this process from an earlier one of the same name."""
        return self._incarnation

    def holder(self, name: str) -> str | None:
        """Incarnation of the living process called `name`, whether or not its record is readable here. BrokerError."""
        with translate():
            found = self._client.hget(keys.replica(name), "incarnation")
        return found.decode() if isinstance(found, bytes) else found

    def expired(self) -> Names:
        """Names whose lease has ended and that nobody has withdrawn yet: the janitor's work. Raises BrokerError."""
        names = self._names()
        with translate(), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(keys.replica(name))
            alive = pipe.execute()
        return [name for name, lives in zip(names, alive, strict=True) if not lives]

    def _names(self) -> Names:
        with translate():
            return sorted(name.decode() for name in self._client.smembers(keys.REPLICAS) if isinstance(name, bytes))

    def _take(self, replica: Replica, lease_s: float) -> int:
        """0 when the name is ours now, else the ms for which another process still holds it."""
        args = [
            replica.name,
            self._incarnation,
            encode(replica),
            json.dumps(replica.stats),
            json.dumps(replica.load),
            _ms(lease_s),
        ]
        with translate():
            return int(self._scripts.run("replica_register", [keys.replica(replica.name), keys.REPLICAS], args))


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _read(name: str, record: dict[bytes, bytes]) -> Replica | None:
    try:
        return decode(record[b"replica"], record[b"stats"], record[b"load"])
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("the record of replica %s is not readable: %s: %s", name, type(error).__name__, error)
        return None
