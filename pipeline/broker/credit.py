"""Credit: the page server's side of one handoff. Who may write, what is in flight, what is given back.

The rule itself is `pipeline/budget.py`; here are the scripts that enforce it, by Redis TIME, one atomic step each.
Every step may be repeated: a reply that got lost is asked for once more and nothing is counted twice. What ends a
handoff (header, give back, release, fence) passes at maxmemory, what begins something (reserve, SET) does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError

from pipeline.broker import keys
from pipeline.broker.connect import translate
from pipeline.broker.scripts import Scripts, source
from pipeline.budget import SHARE_DIVISOR, WAITER_LEASE_MS, Answer
from pipeline.codec import Buffer
from pipeline.errors import BudgetTooSmallError, StaleAttemptError
from pipeline.handoff import Attempts
from pipeline.header import require_handoff_id, require_identity
from pipeline.settings import BrokerSettings

T = TypeVar("T")
_BUDGET_KEYS = [
    keys.BUDGET_TOTAL,
    keys.BUDGET_WAITERS,
    keys.BUDGET_WAITER_LEASES,
    keys.BUDGET_LEASES,
    keys.BUDGET_HELD,
    keys.BUDGET_WANTS,
]


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
    return f"{attempts.prefill << 16 | attempts.decode}-{sequence}"


def repeated(call: Callable[[], T]) -> T:
    """Run an idempotent step; once more when the connection broke. Raises BrokerError."""
    with translate():
        try:
            return call()
        except RedisConnectionError:
            return call()


class Credit:
    """One handoff under one pair of attempts. Raises FrameError for an id or attempts that no frame can carry."""

    def __init__(self, client: Redis, handoff_id: str, attempts: Attempts, settings: BrokerSettings) -> None:
        require_identity(handoff_id, attempts)
        self.names = keys.HandoffKeys(handoff_id)
        self.attempts = attempts
        self._client = client
        self._settings = settings
        self._scripts = {name: client.register_script(source(name)) for name in ("reserve", "header", "imported")}
        self._ttl_ms = int(settings.handoff_ttl_s * 1000)
        self._common = _arguments(handoff_id, lease_ms(settings))

    def payload_key(self, sequence: int) -> str:
        return self.names.payload(str(self.attempts), sequence)

    def reserve(self, sequence: int, size: int) -> bool:
        """True: `size` bytes may be put in flight. False: wait, asking again within the waiter's lease.

        Raises StaleAttemptError, BudgetTooSmallError, and redis' OutOfMemoryError for the caller to be patient with.
        """
        budget = self._settings.budget_bytes
        args = [str(self.attempts), self._field(sequence), size, budget, SHARE_DIVISOR, self._ttl_ms]
        *_, status = self._evaluate("reserve", args, [keys.BUDGET_ARRIVALS])
        answer = self._current(status)
        if answer == Answer.REFUSED:
            raise BudgetTooSmallError(budget, size)
        return answer == Answer.GRANTED

    def send(self, sequence: int, header: bytes, payload: Buffer) -> Exception | str:
        """Payload and header in one round trip, the payload never copied.

        Returns "ok", "missing" (the payload is not there: expired, or never stored), or the error that kept the
        payload from being stored. Raises StaleAttemptError.
        """
        key, ttl_ms = self.payload_key(sequence), lease_ms(self._settings)

        def store(pipe: Pipeline) -> None:
            if payload:
                pipe.set(key, payload, px=ttl_ms)  # a memoryview goes to the socket as it is

        entry = entry_id(self.attempts, sequence)
        args = [str(self.attempts), entry, header, len(payload), self._field(sequence), self._ttl_ms]
        *stored, answer = self._evaluate("header", args, before=store)
        status = self._current(answer)
        return stored[0] if status == "missing" and isinstance(stored[0], Exception) else status

    def give_back(self, sequence: int) -> None:
        """The page is in the engine, or is given up: payload, credit and header entry go. Once is enough."""
        self._evaluate("imported", [self._field(sequence), entry_id(self.attempts, sequence)])

    def give_back_and_fetch(self, sequence: int, following: int, limit: int) -> bytes:
        """`give_back`, and in the same round trip `fetch` of frame `following`."""
        key, args = self.payload_key(following), [self._field(sequence), entry_id(self.attempts, sequence)]
        fetched, _ = self._evaluate("imported", args, before=lambda pipe: pipe.getrange(key, 0, limit - 1))
        return fetched if isinstance(fetched, bytes) else b""  # an error: whoever needs it asks again

    def fetch(self, sequence: int, limit: int) -> bytes:
        """At most `limit` bytes of a payload, whatever its size: nobody can make us allocate more. b"" when gone."""
        key = self.payload_key(sequence)
        return repeated(lambda: cast(bytes, self._client.getrange(key, 0, limit - 1)))

    def fence(self) -> str | None:
        """The pair that may write now; None after release, reaping or a restart of the server."""
        value = repeated(lambda: cast("bytes | None", self._client.get(self.names.fence)))
        return value.decode() if value else None

    def _field(self, sequence: int) -> str:
        return f"{self.attempts}.{sequence}"

    def _evaluate(
        self,
        name: str,
        args: list[Any],
        more_keys: Sequence[str] = (),
        before: Callable[[Pipeline], object] = lambda pipe: None,
    ) -> list[Any]:
        """The replies to the commands `before` queues, errors as values, and last the script's, never an error.

        EVALSHA by hand: redis-py's own scripts in a pipeline cost one more round trip each time.
        """
        script, names = self._scripts[name], [*_BUDGET_KEYS, *more_keys]

        def call() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:
                before(pipe)
                pipe.evalsha(script.sha, len(names), *names, *self._common, *args)
                return pipe.execute(raise_on_error=False)

        results = repeated(call)
        if isinstance(results[-1], NoScriptError):
            repeated(lambda: self._client.script_load(script.script))
            results = repeated(call)
        if isinstance(results[-1], Exception):
            raise results[-1]
        return results

    def _current(self, reply: bytes) -> str:
        """A script's status. Only D ends a fence: a writer without one is no longer wanted."""
        status = reply.decode()
        if status in ("stale", "gone"):
            raise StaleAttemptError(f"attempt {self.attempts} may not write any more: its fence is {status}")
        return status


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


def heartbeat(client: Redis, handoff_id: str, settings: BrokerSettings) -> bool:
    """Its workers live: credits keep their lease, payloads their time to live. False when it holds no credit."""
    require_handoff_id(handoff_id)
    args = [int(settings.payload_ttl_s * 1000), int(settings.handoff_ttl_s * 1000)]
    return bool(_run(client, "heartbeat", handoff_id, args, lease_ms(settings)))


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

    total, waiters, handoffs = repeated(read)
    return BudgetGauges(int(total or 0), waiters, handoffs)


def _run(client: Redis, name: str, handoff_id: str, args: Sequence[Any] = (), lease: int = 0) -> Any:
    """Scripts that renew no lease take 0 for it."""
    common = _arguments(handoff_id, lease)
    return repeated(lambda: Scripts(client).run(name, _BUDGET_KEYS, [*common, *args]))


def _arguments(handoff_id: str, lease: int) -> list[Any]:
    """ARGV 1-8 of every script that includes budget.lua."""
    pattern = keys.HandoffKeys("*")
    places = (pattern.credits, pattern.stream, pattern.fence, pattern.wake, pattern.payload_prefix)
    return [handoff_id, lease, WAITER_LEASE_MS, *places]
