"""Credit: the page server's side of one handoff. Who may write, what is in flight, what is given back.

The rule itself is `pipeline/budget.py`; here are the scripts that enforce it, by Redis TIME, one atomic step each.
Every step may be repeated: a reply that got lost is asked for once more and nothing is counted twice. What ends a
handoff (header, give back, release, fence) passes at maxmemory, what begins something (reserve, SET) does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from pipeline.broker import keys
from pipeline.broker.connect import translate
from pipeline.broker.payload import Call, Link, Word, command, store
from pipeline.broker.returns import Returns
from pipeline.broker.scripts import Scripts, source
from pipeline.budget import SHARE_DIVISOR, WAITER_LEASE_MS, Answer
from pipeline.codec import Buffer
from pipeline.errors import BudgetTooSmallError, StaleAttemptError
from pipeline.handoff import Attempts
from pipeline.header import require_handoff_id, require_identity
from pipeline.settings import MIB, BrokerSettings

T = TypeVar("T")
GROUP_BYTES = MIB  # pages of so much payload share one step of the ledger's: small pages cost no more than large ones
_HEALS = 10  # a server whose scripts are flushed may lose them again between two of our steps
_BUDGET_KEYS = [
    keys.BUDGET_TOTAL,
    keys.BUDGET_WAITERS,
    keys.BUDGET_WAITER_LEASES,
    keys.BUDGET_LEASES,
    keys.BUDGET_HELD,
    keys.BUDGET_WANTS,
]
_SCRIPTS: dict[str, list[str]] = {"reserve": [keys.BUDGET_ARRIVALS], "header": [], "imported": []}  # further keys


class BudgetGauges(NamedTuple):
    """Bytes in flight, handoffs waiting for credit, handoffs holding some."""

    in_flight_bytes: int
    waiters: int
    handoffs: int


def lease_ms(settings: BrokerSettings) -> int:
    """A credit is reaped when its page would have expired anyway: neither outlives the other."""
    return int(settings.payload_ttl_s * 1000)


def entry_id(attempts: Attempts, sequence: int) -> str:
    """Stream id of a frame: explicit, so that writing it twice stores it once."""
    return f"{entry_prefix(attempts)}{sequence}"


def entry_prefix(attempts: Attempts) -> str:
    """What the entry ids of all frames under these attempts begin with."""
    return f"{attempts.prefill << 16 | attempts.decode}-"


def repeated(client: Redis, call: Callable[[], T]) -> T:
    """Run an idempotent step; once more when the connection broke. Raises BrokerError."""
    with translate(client):
        try:
            return call()
        except RedisConnectionError:
            return call()


class Outgoing(NamedTuple):
    """A frame on its way to the server. `anywhere`: it need not follow the frame before it (ABORT)."""

    sequence: int
    header: bytes
    payload: Buffer
    anywhere: bool = False


class Grant(NamedTuple):
    """How many of the values asked for may go; `why` not all: Answer.WAIT, or the server's error."""

    number: int
    why: Exception | Answer | None


class Sent(NamedTuple):
    """How many of the frames are on the server; `why` not all: "missing" (the payload is not there: expired, or never
    stored), or the error that kept it from being stored."""

    number: int
    why: Exception | str | None


class Credit:
    """One handoff under one pair of attempts, on one connection. Not for two threads at once.

    Raises FrameError for an id or attempts that no frame can carry; StaleAttemptError from every step of a writer
    whose fence is gone; whatever `check` raises while the server makes us wait.
    """

    def __init__(
        self,
        client: Redis,
        handoff_id: str,
        attempts: Attempts,
        settings: BrokerSettings,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        require_identity(handoff_id, attempts)
        self.names = keys.HandoffKeys(handoff_id)
        self.attempts = attempts
        self.link = Link(client, check)
        self._client = client
        self._settings = settings
        self._ttl_ms = int(settings.handoff_ttl_s * 1000)
        self._pair = str(attempts)
        self._payload_prefix = self.names.payload_prefix + self._pair
        self._entry_prefix = entry_prefix(attempts)
        self._lease_ms = lease_ms(settings)
        common = _arguments(handoff_id, self._lease_ms)
        self._scripts = {
            name: _call(client, name, [*_BUDGET_KEYS, *more_keys], common) for name, more_keys in _SCRIPTS.items()
        }

    def payload_key(self, sequence: int) -> str:
        return f"{self._payload_prefix}.{sequence}"

    def exchange(self, frames: Sequence[Outgoing], wanted: Sequence[int], size: int) -> tuple[Sent, Grant]:
        """One round trip: `frames` go, each payload before its header, and `size` bytes for each of `wanted` are asked
        for. Asking or sending again changes nothing. Raises BudgetTooSmallError when no credit can hold `size`."""
        groups = list(_groups(frames))
        parts = [part for group in groups for part in self._group(group)]
        if wanted:
            parts.append(self._wish(wanted, size))
        replies = self._run(parts, sum(map(_replies, groups)) + bool(wanted))
        sent = self._sent(groups, replies)
        return sent, self._grant(replies[-1], size) if wanted else Grant(0, None)

    def reserve(self, sequence: int, size: int) -> bool:
        """True: `size` bytes may be put in flight. False: wait, asking again within the waiter's lease."""
        _, grant = self.exchange([], [sequence], size)
        if isinstance(grant.why, Exception):
            raise grant.why
        return grant.number == 1

    def await_wake(self, timeout_s: float) -> None:
        """Until the server says that it may be worth asking again. A lost wake heals: the caller asks anyway."""
        self._run([command("BLPOP", self.names.wake, f"{timeout_s:g}")], 1)

    def give_back(self, sequences: Sequence[int]) -> None:
        """These pages are in the engine, or are given up: payload, credit and header entry go. Once is enough."""
        if sequences:
            self._require(*self._run([self.returning(sequences)], 1))

    def returning(self, sequences: Sequence[int]) -> bytes:
        """The command of `give_back`."""
        each = [(self._field(sequence), f"{self._entry_prefix}{sequence}") for sequence in sequences]
        return self._script("imported", [word for words in each for word in words])

    def fetch(self, sequence: int, target: memoryview) -> memoryview:
        """A payload; empty when it is gone. Raises FrameError where it does not fit: nobody makes us allocate more."""
        return next(self.fetch_all([(sequence, target)]))

    def fetch_all(
        self, wanted: Sequence[tuple[int, memoryview]], returns: Returns | None = None, *, again: bool = True
    ) -> Iterator[memoryview]:
        """`fetch` of several in one round trip, received one by one; what is in `returns` is given back on the way.
        `again`: where the connection breaks.

        GET and not GETRANGE, which would say how much fits: Valkey (from 9.0 on) sends a whole value from where it
        lies, and makes a copy of any part of one.
        """
        returned = returns.take() if returns else []
        parts = [command("GET", self.payload_key(one)) for one, _ in wanted]
        if returned:
            parts.insert(0, self.returning(returned))
        repeated(self._client, lambda: self.link.send(parts, len(parts)))
        if returned and not self._is_answered():
            assert returns is not None
            returns.put(returned)
            if not self.link.due:  # the connection is ended
                yield from self.fetch_all(wanted, again=False)
                return
        for at, (_, target) in enumerate(wanted):
            try:
                got = self.link.reply_into(target)
            except RedisConnectionError as error:
                if not again:
                    self._require(error)
                yield from self.fetch_all(wanted[at:], again=False)
                return
            except RedisError as error:
                got = error
            yield self._require(got)

    def headers(self, after: str, count: int, block_ms: int, returned: Sequence[int] = ()) -> list[tuple[bytes, bytes]]:
        """Up to `count` entry ids and headers behind `after`; none when nothing came for `block_ms`. Pages that were
        `returned` are given back first."""
        parts = [command("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", self.names.stream, after)]
        if returned:
            parts.insert(0, self.returning(returned))
        streams = [self._require(reply) for reply in self._run(parts, len(parts))][-1]
        return [(entry, _field(fields, b"h")) for entry, fields in streams[0][1]] if streams else []

    def fence(self) -> str | None:
        """The pair that may write now; None after release, reaping or a restart of the server."""
        (reply,) = self._run([command("GET", self.names.fence)], 1)
        value = self._require(reply)
        return value.decode() if value else None

    def _is_answered(self) -> bool:
        """Whether the next reply says that credit was given back; it may be asked for again."""
        try:
            return isinstance(self.link.reply(), int)
        except RedisError:  # the connection broke, or nothing came on it: it is ended then
            return False

    def _group(self, frames: Sequence[Outgoing]) -> list[Buffer]:
        """All payloads, then all headers."""
        parts: list[Buffer] = []
        args: list[Word] = [self._pair, self._ttl_ms]
        for sequence, header, payload, anywhere in frames:
            if payload:
                parts += store(self.payload_key(sequence), payload, self._lease_ms)
            args += [
                f"{self._entry_prefix}{sequence}",
                header,
                len(payload),
                self._field(sequence),
                0 if anywhere else 1,
            ]
        return [*parts, self._script("header", args)]

    def _sent(self, groups: Sequence[Sequence[Outgoing]], replies: list[Any]) -> Sent:
        number = at = 0
        for group in groups:
            *stored, answer = replies[at : at + _replies(group)]
            count, status = self._require(answer)
            number += count
            if (said := self._current(status)) != "ok":
                refused = stored[_replies(group[:count]) - 1] if group[count].payload else None
                return Sent(number, refused if isinstance(refused, Exception) else said)
            at += _replies(group)
        return Sent(number, None)

    def _wish(self, wanted: Sequence[int], size: int) -> bytes:
        budget = self._settings.budget_bytes
        args: list[Word] = [self._pair, size, budget, SHARE_DIVISOR, self._ttl_ms, *map(self._field, wanted)]
        return self._script("reserve", args)

    def _grant(self, reply: Any, size: int) -> Grant:
        if isinstance(reply, Exception):
            return Grant(0, reply)
        count, status = reply
        answer = Answer(self._current(status))
        if answer is Answer.REFUSED:
            raise BudgetTooSmallError(self._settings.budget_bytes, size)
        return Grant(count, None if answer is Answer.GRANTED else answer)

    def _field(self, sequence: int) -> str:
        return f"{self._pair}.{sequence}"

    def _script(self, name: str, args: Sequence[Word]) -> bytes:
        return self._scripts[name].command(*args)

    def _run(self, parts: Sequence[Buffer], count: int) -> list[Any]:
        """The `count` replies to `parts`, refusals as values. Sent once more when the connection broke, or the server
        had lost its scripts: every step of ours may be repeated. Raises BrokerError."""

        def call() -> list[Any]:
            self.link.send(parts, count)
            return [self.link.reply() for _ in range(count)]

        replies = repeated(self._client, call)
        for _ in range(_HEALS):
            if not any(isinstance(reply, NoScriptError) for reply in replies):
                break
            for name in self._scripts:
                repeated(self._client, partial(self._client.script_load, source(name)))
            replies = repeated(self._client, call)
        return replies

    def _require(self, reply: Any) -> Any:
        """The reply, or the server's refusal as BrokerError."""
        if isinstance(reply, Exception):
            with translate(self._client):
                raise reply
        return reply

    def _current(self, reply: bytes) -> str:
        """A script's status. Only D ends a fence: a writer without one is no longer wanted."""
        status = reply.decode()
        if status in ("stale", "gone"):
            raise StaleAttemptError(f"attempt {self.attempts} may not write any more: its fence is {status}")
        return status


def _groups(frames: Sequence[Outgoing]) -> Iterator[Sequence[Outgoing]]:
    """`frames` in order, in groups that end where they have GROUP_BYTES of payload."""
    begin = size = 0
    for end, frame in enumerate(frames, 1):
        size += len(frame.payload)
        if size >= GROUP_BYTES or end == len(frames):
            yield frames[begin:end]
            begin, size = end, 0


def _replies(group: Sequence[Outgoing]) -> int:
    """One for each payload, one for all headers."""
    return sum(1 for frame in group if frame.payload) + 1


def _call(client: Redis, name: str, names: Sequence[str], common: Sequence[Word]) -> Call:
    return Call("EVALSHA", client.register_script(source(name)).sha, len(names), *names, *common)


def _field(fields: list[bytes], name: bytes) -> bytes:
    """One field of a stream entry; b"" where it has none."""
    return dict(zip(fields[::2], fields[1::2], strict=True)).get(name, b"")


def raise_fence(client: Redis, handoff_id: str, attempts: Attempts, settings: BrokerSettings) -> None:
    """Only this pair may write from now on, on a fresh stream; what older attempts left behind is dropped.

    D calls it right before it writes `accept`. Again with the same pair it changes nothing. Raises StaleAttemptError
    when a newer attempt was here, FrameError for an id or attempts that no frame can carry.
    """
    require_identity(handoff_id, attempts)
    ttl_ms = int(settings.handoff_ttl_s * 1000)
    if _run(client, "fence", handoff_id, [attempts.prefill, attempts.decode, ttl_ms]) == b"stale":
        raise StaleAttemptError(f"a newer attempt than {attempts} owns the transfer")


def release(client: Redis, handoff_id: str) -> None:
    """Everything of the handoff goes from the page server; whoever waits for its bytes wakes. Idempotent."""
    require_handoff_id(handoff_id)
    _run(client, "release", handoff_id)


def heartbeat(client: Redis, handoff_ids: Sequence[str], settings: BrokerSettings) -> list[bool]:
    """Their workers live: credits keep their lease, payloads their time to live. False for one that holds no credit.

    Round trips do not grow with the handoffs: a worker's own lease waits behind this one.
    """
    for handoff_id in handoff_ids:
        require_handoff_id(handoff_id)
    args = [int(settings.payload_ttl_s * 1000), int(settings.handoff_ttl_s * 1000)]
    script = client.register_script(source("heartbeat"))

    def call() -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            for handoff_id in handoff_ids:
                script(_BUDGET_KEYS, [*_arguments(handoff_id, lease_ms(settings)), *args], client=pipe)
            return pipe.execute()

    return [bool(reply) for reply in repeated(client, call)] if handoff_ids else []


def reap(client: Redis) -> list[str]:
    """Close every handoff whose credit lease ended; returns their ids. Its writer finds itself stale."""
    return [handoff_id.decode() for handoff_id in _run(client, "reap", "")]


def gauges(client: Redis) -> BudgetGauges:
    def read() -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            pipe.get(keys.BUDGET_TOTAL)
            pipe.hlen(keys.BUDGET_WANTS)
            pipe.hlen(keys.BUDGET_HELD)
            return pipe.execute()

    total, waiters, handoffs = repeated(client, read)
    return BudgetGauges(int(total or 0), waiters, handoffs)


def _run(client: Redis, name: str, handoff_id: str, args: Sequence[Any] = (), lease: int = 0) -> Any:
    """Scripts that renew no lease take 0 for it."""
    common = _arguments(handoff_id, lease)
    return repeated(client, lambda: Scripts(client).run(name, _BUDGET_KEYS, [*common, *args]))


def _arguments(handoff_id: str, lease: int) -> list[Any]:
    """ARGV 1-8 of every script that includes budget.lua."""
    pattern = keys.HandoffKeys("*")
    places = (pattern.credits, pattern.stream, pattern.fence, pattern.wake, pattern.payload_prefix)
    return [handoff_id, lease, WAITER_LEASE_MS, *places]
