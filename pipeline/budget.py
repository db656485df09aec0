"""Budget: the byte cap on pages in flight, as a pure model. The broker's Lua scripts are the same rule in Lua.

A credit is the right to put N bytes in flight, named by (handoff, key) and counted once however often it is asked
for. Rules: (1) the sum never passes the budget; (2) no handoff holds more than `share` un-imported, so a stopped
decoder stalls itself first; (3) whoever waits for the budget is served in order of arrival and nobody overtakes;
(4) whoever waits for its own share stands in nobody's way; (5) credits of a silent handoff are reaped by lease.
One property test drives this model and the scripts in lockstep. Time enters as an argument, in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pipeline.errors import BudgetTooSmallError

WAITER_LEASE_MS = 2_000  # a waiter asks again at least every 250 ms
SHARE_DIVISOR = 8


class Answer(StrEnum):
    """What `reserve` says. `REFUSED`: the value can never fit, waiting would not help."""

    GRANTED = "granted"
    WAIT = "wait"
    REFUSED = "refused"


class Wait(NamedTuple):
    """A waiter's wish. `arrival` None: it waits for its own share, not for the budget."""

    size: int
    arrival: int | None
    lease_ms: float


def share(budget_bytes: int, value_bytes: int) -> int:
    """Bytes one handoff may have in flight: two values at least (one on the wire, one being imported)."""
    return max(2 * value_bytes, budget_bytes // SHARE_DIVISOR)


def require_fits(budget_bytes: int, value_bytes: int) -> None:
    """Raise BudgetTooSmallError when not even one value fits: checked at start, before any prompt waits."""
    if value_bytes > budget_bytes:
        raise BudgetTooSmallError(budget_bytes, value_bytes)


@dataclass(slots=True)
class Budget:
    """The ledger: who holds what, who waits, who was woken and has not looked yet."""

    budget_bytes: int
    lease_ms: float
    credits: dict[str, dict[str, int]] = field(default_factory=dict)  # handoff -> key -> bytes
    leases: dict[str, float] = field(default_factory=dict)  # handoff -> when its credits may be reaped
    waits: dict[str, Wait] = field(default_factory=dict)
    woken: set[str] = field(default_factory=set)
    arrivals: int = 0

    @property
    def total(self) -> int:
        return sum(self.held(handoff) for handoff in self.credits)

    def held(self, handoff: str) -> int:
        return sum(self.credits.get(handoff, {}).values())

    def queue(self) -> list[str]:
        """Who waits for the budget, first come first."""
        arrived = [(wait.arrival, handoff) for handoff, wait in self.waits.items() if wait.arrival is not None]
        return [handoff for _, handoff in sorted(arrived)]

    def reserve(self, handoff: str, key: str, size: int, now_ms: float) -> Answer:
        """Ask for `size` bytes. Asking again for a credit already held is granted and counts nothing."""
        if key in self.credits.get(handoff, {}):
            self.leases[handoff] = now_ms + self.lease_ms
            return Answer.GRANTED
        if size > self.budget_bytes:
            return Answer.REFUSED
        if self.held(handoff) + size > share(self.budget_bytes, size):
            self.waits[handoff] = Wait(size, None, now_ms + WAITER_LEASE_MS)
            return Answer.WAIT
        self._drop_dead_heads(now_ms)
        ahead = self.queue()[:1]
        if ahead not in ([], [handoff]) or self.total + size > self.budget_bytes:
            self._stand_in_line(handoff, size, now_ms)
            return Answer.WAIT
        self._grant(handoff, key, size, now_ms)
        return Answer.GRANTED

    def true_up(self, handoff: str, key: str, size: int, now_ms: float) -> None:
        """The codec made it smaller: a credit shrinks to what was really sent, it never grows."""
        held = self.credits.get(handoff, {})
        if key in held and size < held[key]:
            held[key] = size
            self._wake(now_ms)

    def release(self, handoff: str, key: str, now_ms: float) -> None:
        """One page is in the engine. A second time it changes nothing."""
        if self.credits.get(handoff, {}).pop(key, None) is None:
            return
        if self.credits[handoff]:
            self.leases[handoff] = now_ms + self.lease_ms
        else:
            del self.credits[handoff], self.leases[handoff]
        if handoff in self.waits and self.waits[handoff].arrival is None:
            self.woken.add(handoff)
        self._wake(now_ms)

    def close(self, handoff: str, now_ms: float) -> None:
        """Everything of a handoff goes: its credits, its place in the line."""
        self._forget(handoff)
        self._wake(now_ms)

    def heartbeat(self, handoff: str, now_ms: float) -> None:
        if handoff in self.leases:
            self.leases[handoff] = now_ms + self.lease_ms

    def reap(self, now_ms: float) -> list[str]:
        """Take back the credits of every handoff whose lease ended; returns who they were."""
        dead = sorted(handoff for handoff, ends_ms in self.leases.items() if ends_ms <= now_ms)
        for handoff in dead:
            self._forget(handoff)
        self._wake(now_ms)
        return dead

    def _forget(self, handoff: str) -> None:
        self.credits.pop(handoff, None)
        self.leases.pop(handoff, None)
        self.waits.pop(handoff, None)
        self.woken.discard(handoff)

    def _grant(self, handoff: str, key: str, size: int, now_ms: float) -> None:
        self.credits.setdefault(handoff, {})[key] = size
        self.leases[handoff] = now_ms + self.lease_ms
        self.waits.pop(handoff, None)
        self._wake(now_ms)

    def _stand_in_line(self, handoff: str, size: int, now_ms: float) -> None:
        known = self.waits.get(handoff)
        arrival = known.arrival if known else None
        if arrival is None:
            self.arrivals += 1
            arrival = self.arrivals
        self.waits[handoff] = Wait(size, arrival, now_ms + WAITER_LEASE_MS)

    def _drop_dead_heads(self, now_ms: float) -> None:
        for handoff in self.queue():
            if self.waits[handoff].lease_ms > now_ms:
                return
            del self.waits[handoff]

    def _wake(self, now_ms: float) -> None:
        """Wake from the head of the line while bytes remain; the dead on the way are dropped."""
        free = self.budget_bytes - self.total
        for handoff in self.queue():
            wait = self.waits[handoff]
            if wait.lease_ms <= now_ms:
                del self.waits[handoff]
            elif wait.size > free:
                return
            else:
                free -= wait.size
                self.woken.add(handoff)
