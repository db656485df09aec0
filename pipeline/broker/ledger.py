"""Ledger: the record of every live handoff, and the only place that moves its state.

Each step is one script, a compare-and-set against `handoff.TRANSITIONS`; whoever loses a race reads the winner.
Workers `enter` and `leave`; the last one out releases. Every record carries a TTL, should all cleanup fail.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, NamedTuple

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import WatchError

from pipeline import request as requests
from pipeline.broker import channel, keys, opening, transition
from pipeline.broker import record as records
from pipeline.broker.address import Address
from pipeline.broker.batch import Batch
from pipeline.broker.channel import ErrorInfo, TokenEntry
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import translate
from pipeline.broker.opening import Command
from pipeline.broker.page_server import PageServers
from pipeline.broker.record import Accept, Record, Role, Snapshot
from pipeline.broker.scripts import Scripts, Step
from pipeline.broker.transition import Fields
from pipeline.contract import Contract
from pipeline.errors import BrokerError, HandoffCancelledError
from pipeline.handoff import TERMINAL, Event, State, after, can
from pipeline.request import Request
from pipeline.settings import Settings

RECENT_KEPT = 256  # traces of ended handoffs
_TOMBSTONE_MS = 30_000  # how long an ended record waits for an API that died
_REFUSALS = {b"gone": "gone", b"taken": "begun by another worker", b"moved": "with another replica by now"}
_TRIES = 8  # at a change of a record that others write to all the while


class Change(NamedTuple):
    """What `reassign` writes: fields, fields to drop, and jobs into the same transaction."""

    fields: Fields
    drop: tuple[str, ...]
    enqueue: Callable[[Pipeline], object]


class Ledger:
    """Bound to the control broker (`client`); `pages` are the servers on which handoffs hold credit."""

    def __init__(self, client: Redis, pages: PageServers, clock: BrokerClock, settings: Settings) -> None:
        self._client = client
        self.pages = pages
        self._clock = clock
        self._settings = settings
        self._scripts = Scripts(client)
        self._emits = Batch(client, "emit")

    @cached_property
    def _ttl_ms(self) -> int:
        return int(self._settings.broker.handoff_ttl_s * 1000)

    # -- the API's side

    def opening(
        self,
        request: Request,
        contract: Contract,
        route: Mapping[str, str | None],
        owner: str,
        jobs: Sequence[Command] = (),
        traceparent: str = "",
        owner_ttl_s: float = 0.0,
        within_s: float | None = None,
    ) -> Step:
        """Writes the record and queues `jobs`: see `opening.step`, which says what the rest is. Its reply: 1, or 0
        where it came too late and nothing was done."""
        record = opening.fields(request, contract, route, owner, self._settings.handoff.failure_policy, traceparent)
        lives = (owner, int(owner_ttl_s * 1000)) if owner_ttl_s else None
        within_ms = None if within_s is None else int(within_s * 1000)
        now_ms = self._clock.now_ms()
        return opening.step(request.handoff_id, record, jobs, now_ms, self._ttl_ms, lives, within_ms)

    def reassign(self, handoff_id: str, event: Event, change: Callable[[Record], Change | None]) -> bool:
        """Move it by `event` and queue new jobs, as `change` says of the record as it is, in one transaction.

        False when it is gone or has ended, `change` says None, or others write to it all the while: look again later.
        """
        with translate(), self._client.pipeline(transaction=True) as pipe:
            for _ in range(_TRIES):
                try:
                    return self._reassign(pipe, handoff_id, event, change)
                except WatchError:
                    continue
        return False

    def _reassign(
        self, pipe: Pipeline, handoff_id: str, event: Event, change: Callable[[Record], Change | None]
    ) -> bool:
        """Raises WatchError when the record was written to meanwhile."""
        names = keys.HandoffKeys(handoff_id)
        pipe.watch(names.record)
        record = self.load(handoff_id)
        if record is None or not can(record.state, event) or (changed := change(record)) is None:
            return False
        pipe.multi()
        mapping = {**changed.fields, "state": after(record.state, event), "at_dispatched": self._clock.now_ms()}
        pipe.hset(names.record, mapping=mapping)  # type: ignore[arg-type]
        pipe.hdel(names.record, *changed.drop)
        changed.enqueue(pipe)
        pipe.publish(names.events, event)
        pipe.execute()
        return True

    def own(self, owner: str, ttl_s: float) -> None:
        """The API process `owner` is alive for another `ttl_s`: nobody works for a dead one."""
        with translate():
            self._scripts.run("own", [keys.owner(owner)], [int(ttl_s * 1000)])

    def owned(self, record: Snapshot) -> bool:
        with translate():
            return bool(self._client.exists(keys.owner(record.fields["owner"])))

    def cancel(self, handoff_id: str, reason: str) -> State | None:
        """Ask for the end. Returns the state that followed, the winner's if it had ended, None if unknown."""
        status, state, idle = self._leave(
            handoff_id, "", 0, transitions=transition.table(Event.CANCEL), publish="cancel", fields={"reason": reason}
        )
        if status == "ok" and idle and state in TERMINAL:
            self.release(handoff_id)
        return None if status == "gone" else state

    def stop(self, handoff_id: str) -> bool:
        """The API saw a stop string: finished, later log entries do not count."""
        return self._run_advance(handoff_id, None, 0, transition.table(Event.FINISH), "stop", {})[0] == "ok"

    def forget(self, handoff_id: str) -> None:
        """The API has read everything it wants of an ended handoff."""
        self._bury(handoff_id, "forgotten", "released")

    def settling(self, handoff_id: str, *, shown: bool) -> Step:
        """`forget` as a step; where `shown`, its reply says what `settled` makes a trace of."""
        return self._burial(handoff_id, "forgotten", "released", records.SHOWN if shown else ())

    @staticmethod
    def settled(handoff_id: str, reply: str | bytes) -> dict[str, Any] | None:
        """The trace as it was; None where there was none, or it was not to be shown."""
        fields = dict[str, str](json.loads(reply))
        state = fields.pop("state", None)
        return records.trace(Snapshot(handoff_id, State(state), fields)) if state else None

    def capture(self, handoff_id: str) -> State | None:
        """Ask D to store this handoff when it ends. Returns its state, a terminal one when it is too late, or None."""
        seen = self.peek(handoff_id)
        if seen is None or seen.state in TERMINAL:
            return seen.state if seen else None
        return self._run_advance(handoff_id, None, 0, "", "capture", {"capture": 1})[1]

    def trace(self, handoff_id: str) -> dict[str, Any] | None:
        """Route, counts and marks of one handoff, no text; None when it is gone."""
        found = self.traces([handoff_id])
        return found[0] if found else None

    def traces(self, handoff_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The same of several in one round trip; those that are gone are left out. No prompt is read."""
        with translate(), self._client.pipeline(transaction=False) as pipe:
            for handoff_id in handoff_ids:
                pipe.hmget(keys.HandoffKeys(handoff_id).record, records.SHOWN)
            answers = pipe.execute()
        found = [records.snapshot(i, values, records.SHOWN) for i, values in zip(handoff_ids, answers, strict=True)]
        return [records.trace(seen) for seen in found if seen is not None]

    def ended(self, handoff_id: str) -> dict[str, Any] | None:
        """The trace of a handoff that ended lately; None when it is live or forgotten."""
        return next((trace for trace in self.recent(RECENT_KEPT) if trace["handoff_id"] == handoff_id), None)

    def recent(self, count: int) -> list[dict[str, Any]]:
        """Traces of handoffs that ended lately, newest first."""
        if count <= 0:
            return []
        with translate():
            return [json.loads(t) for t in self._client.lrange(keys.RECENT, 0, count - 1)]

    def live(self) -> list[str]:
        """Ids of handoffs not yet released, oldest first."""
        with translate():
            ids: Any = self._client.zrange(keys.LIVE, 0, -1)
        return [handoff_id.decode() for handoff_id in ids]

    # -- the workers' side

    def load(self, handoff_id: str) -> Record | None:
        with translate():
            raw: Any = self._client.hgetall(keys.HandoffKeys(handoff_id).record)
        return records.record(handoff_id, {k.decode(): v.decode() for k, v in raw.items()}) if raw else None

    def request_of(self, record: Record) -> Request:
        """The client's request, continued by what the decode replicas before the present one have emitted."""
        if not record.resumed:
            return record.request
        with translate():
            raw: Any = self._client.lrange(keys.HandoffKeys(record.handoff_id).tokens, 0, -1)
        said = [list[int]() for _ in range(record.request.sampling.n)]
        entries = [entry for entry in map(channel.decode, raw) if entry.seq < record.resumed]
        for entry in entries:
            said[entry.sample % len(said)] += entry.token_ids
        if sum(map(len, said)) != record.resumed:
            raise BrokerError(f"the token log of handoff {record.handoff_id} has lost entries: it cannot go on")
        return requests.resumed(record.request, said)

    def peek(self, handoff_id: str) -> Snapshot | None:
        """State and the small fields, without the prompt; None when it is gone."""
        with translate():
            values: Any = self._client.hmget(keys.HandoffKeys(handoff_id).record, records.SMALL)
        return records.snapshot(handoff_id, values)

    def enter(self, handoff_id: str, role: Role, worker: str, token: str = "") -> tuple[int, Record]:
        """Begin the job of one role; returns the attempt that fences it. `token` makes a repeat of a call one.

        `worker` is `replica@incarnation`. Raises HandoffCancelledError: nothing is left to do, or not by this one.
        """
        names = keys.HandoffKeys(handoff_id)
        replica = worker.rpartition("@")[0] if role == "decode" else ""
        start, token = transition.table(Event.START), token or secrets.token_hex(8)
        args = [role, worker, start, self._clock.now_ms(), token, replica]
        with translate():
            status, *rest = self._scripts.run("enter", [names.record, names.events], args)
        if status != b"ok":
            raise HandoffCancelledError(f"handoff {handoff_id} is {_REFUSALS.get(status) or rest[0].decode()}")
        flat = [item.decode() for item in rest[1]]
        record = records.record(handoff_id, dict(zip(flat[::2], flat[1::2], strict=True)))
        return int(rest[0]), record

    def advance(
        self, handoff_id: str, role: Role, attempt: int, event: Event, fields: Fields | None = None, publish: str = ""
    ) -> State:
        """One transition. Raises StaleAttemptError, HandoffCancelledError (it has ended or is ending)."""
        status, state = self._run_advance(handoff_id, role, attempt, transition.table(event), publish, fields or {})
        transition.require(handoff_id, status, state, event)
        assert state is not None
        return state

    def place(self, handoff_id: str, attempt: int, address: Address) -> None:
        """D's pages cross at `address`: said before anything is there, so that whoever cleans up knows where to look.

        Raises StaleAttemptError, HandoffCancelledError.
        """
        status, state = self._run_advance(handoff_id, "decode", attempt, "", "", {"page_server": str(address)})
        transition.require(handoff_id, status, state, Event.ACCEPT)

    def accept(self, handoff_id: str, accept: Accept, fields: Fields) -> None:
        """D has room: tell P which pages are wanted. Errors as `advance`."""
        fields = {"accept": str(accept), **fields}
        self.advance(handoff_id, "decode", accept.decode_attempt, Event.ACCEPT, fields, publish="accept")

    def mark(self, handoff_id: str, role: Role, attempt: int, fields: Fields, publish: str = "") -> None:
        """Marks and counters without a transition, of one that has ended too; those of a stale attempt are ignored."""
        self._run_advance(handoff_id, role, attempt, "", publish, fields)

    def emit(self, handoff_id: str, attempt: int, entry: TokenEntry, fields: Fields | None = None) -> State:
        """Append tokens (and the terminal, when the entry is the last). Errors as `advance`.

        May be repeated after a BrokerError: an entry that is there already is not appended again.
        """
        event = Event.FINISH if entry.last else Event.EMIT
        status, state = self._emit(handoff_id, str(attempt), entry, event, "", fields or {})
        transition.require(handoff_id, status, state, event)
        assert state is not None
        return state

    def fail(self, handoff_id: str, error: ErrorInfo, attempt: int | None = None) -> bool:
        """End it with an error the client will see; True when this call was the one that ended it."""
        entry = TokenEntry(seq=0, token_ids=(), error=error)
        status, _ = self._emit(
            handoff_id, "" if attempt is None else str(attempt), entry, Event.FAIL, "ended", {"error": error.code}
        )
        return status == "ok"

    def leave(
        self, handoff_id: str, role: Role, attempt: int, error: ErrorInfo | None = None, fields: Fields | None = None
    ) -> None:
        """This worker holds nothing of the handoff any more. The last one out releases what is left of it."""
        status, state, idle = self._leave(
            handoff_id,
            role,
            attempt,
            error=json.dumps(asdict(error)) if error else "",
            publish=f"{role}-left",
            fields=fields or {},
        )
        if status == "ok" and idle and state in TERMINAL:
            self.release(handoff_id)

    def release(self, handoff_id: str) -> None:
        """Give back credit, pages and stream of an ended handoff. Idempotent."""
        record = self.load(handoff_id)
        self.pages.release(record.page_server if record else None, handoff_id)
        with translate():
            if self._client.zrem(keys.LIVE, handoff_id) and record:
                self._remember(record)
        self._bury(handoff_id, "released", "forgotten")

    # -- scripts

    def _remember(self, record: Record) -> None:
        self._scripts.run("remember", [keys.RECENT], [json.dumps(records.trace(record)), RECENT_KEPT, self._ttl_ms])

    def _bury(self, handoff_id: str, mine: str, others: str) -> None:
        with translate():
            self._scripts.run(*self._burial(handoff_id, mine, others))

    @staticmethod
    def _burial(handoff_id: str, mine: str, others: str, shown: Sequence[str] = ()) -> Step:
        names = keys.HandoffKeys(handoff_id)
        return Step("bury", [names.record, names.tokens], [mine, others, _TOMBSTONE_MS, ",".join(shown)])

    def _run_advance(
        self, handoff_id: str, role: Role | None, attempt: int, table: str, publish: str, fields: Fields
    ) -> tuple[str, State | None]:
        names = keys.HandoffKeys(handoff_id)
        args = [role or "", attempt, table, publish, *transition.flat(fields)]
        with translate():
            return transition.answer(self._scripts.run("advance", [names.record, names.events], args))

    def _emit(
        self, handoff_id: str, attempt: str, entry: TokenEntry, event: Event, publish: str, fields: Fields
    ) -> tuple[str, State | None]:
        names = keys.HandoffKeys(handoff_id)
        seq = "" if entry.error else entry.seq
        args = [
            attempt,
            seq,
            len(entry.token_ids),
            entry.encode(),
            transition.table(event),
            self._ttl_ms,
            publish or ("ended" if entry.finish else ""),
            *transition.flat(fields),
        ]
        with translate():
            return transition.answer(self._emits.run([names.record, names.tokens, names.notify, names.events], args))

    def _leave(
        self,
        handoff_id: str,
        role: str,
        attempt: int,
        *,
        error: str = "",
        transitions: str = "",
        publish: str,
        fields: Fields,
    ) -> tuple[str, State | None, bool]:
        names = keys.HandoffKeys(handoff_id)
        args = [
            role,
            attempt,
            error,
            transitions,
            publish,
            transition.table(Event.RELEASE),
            _CANCELLED.encode(),
            self._ttl_ms,
            *transition.flat(fields),
        ]
        with translate():
            answer = self._scripts.run("leave", [names.record, names.tokens, names.notify, names.events], args)
        return (*transition.answer(answer[:2]), bool(answer[2]))


_CANCELLED = TokenEntry(
    seq=0, token_ids=(), error=ErrorInfo("cancelled", "the request was cancelled", retryable=False, http_status=499)
)
