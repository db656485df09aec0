"""Cost: how long until the first token by each way a prompt may take, learned from finished handoffs. Pure.

A way is a prefill engine (None: the decode replica computes the prompt itself) and a decode replica. Its cost is
queue + prefill + exposed: the wait for the prefill engine, the prompt's compute by its length, and what the link
adds after it by the bytes that move (the tail of the transfer, import, first step). Each is a curve that follows
the last dozen observations near a size; nothing is known of hardware. A way nobody has tried near a size is tried,
unless what is known of it already says that it would take far longer.
Times are milliseconds. Must not know brokers or clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.page import PAGE_TOKENS

DECAY = 0.8  # weight of what was known against one new observation: the last dozen count
NEAR = 4.0  # a length is known when one within this factor was seen
RETRY_EVERY = 50  # decisions after which a way that lost is tried once more: replicas and links change
GONE_KEPT = 64  # decode replicas that are gone and yet remembered, should they come back
RETRY_WITHIN = 2.0  # but not where it was expected to take longer than this many times the best
_SMOOTH = 0.3


class Way(NamedTuple):
    """`prefill`: an engine's name, None for the decode replica itself. `decode`: a replica's name."""

    prefill: str | None
    decode: str

    def __str__(self) -> str:
        return f"{self.prefill or 'local'}->{self.decode}"


class Outcome(NamedTuple):
    """What one finished handoff tells. `computed_tokens` went through the prefill engine's model."""

    way: Way
    computed_tokens: int
    moved_bytes: int
    prefill_ms: float
    exposed_ms: float


class Estimate(NamedTuple):
    """Milliseconds of one way; `known`: every part was observed near this size."""

    way: Way
    queue_ms: float
    prefill_ms: float
    exposed_ms: float
    known: bool

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.exposed_ms


class Value(NamedTuple):
    """A point of a curve."""

    y: float
    known: bool


@dataclass(slots=True)
class Curve:
    """y over x >= 0 without an assumed shape: decayed means per octave of x, straight lines between them."""

    _means: dict[int, tuple[float, float]] = field(default_factory=dict)  # octave -> mean x, mean y

    def observe(self, x: float, y: float) -> None:
        octave = int(x).bit_length()
        old_x, old_y = self._means.get(octave, (x, y))
        self._means[octave] = DECAY * old_x + (1 - DECAY) * x, DECAY * old_y + (1 - DECAY) * y

    def at(self, x: float) -> Value:
        """The value at x; beyond what was seen the last line goes on, and never falls below zero."""
        points = sorted(self._means.values())
        if not points:
            return Value(0.0, known=False)
        near = min((_ratio(x, px) for px, _ in points))
        if len(points) == 1:
            ((only_x, only_y),) = points
            return Value(only_y * x / max(only_x, 1.0), near <= NEAR)  # hopeful below, so that it is tried there
        left, right = _around(points, x)
        slope = (right[1] - left[1]) / max(right[0] - left[0], 1e-9)
        if left[0] <= x <= right[0]:
            return Value(left[1] + slope * (x - left[0]), near <= NEAR)
        edge = right if x > right[0] else left
        slope = max(0.0, slope)  # noise must not make a longer prompt free
        return Value(max(0.0, edge[1] + slope * (x - edge[0])), near <= NEAR)


@dataclass(slots=True)
class CostModel:
    """Learns by `observe`, answers by `estimate` and `choose`. One per API process; not for two threads at once."""

    _prefill: dict[str, Curve] = field(default_factory=dict)  # who computes -> ms over tokens
    _exposed: dict[Way, Curve] = field(default_factory=dict)  # ms over bytes
    _service: dict[str, float] = field(default_factory=dict)  # who computes -> a usual prefill's ms
    _since: dict[Way, int] = field(default_factory=dict)  # decisions since the way was taken

    def observe(self, outcome: Outcome) -> None:
        """A handoff has delivered its first token."""
        who = _who(outcome.way)
        self._prefill.setdefault(who, Curve()).observe(outcome.computed_tokens, outcome.prefill_ms)
        self._exposed.setdefault(outcome.way, Curve()).observe(outcome.moved_bytes, outcome.exposed_ms)
        usual = self._service.get(who, outcome.prefill_ms)
        self._service[who] = usual + _SMOOTH * (outcome.prefill_ms - usual)

    def forget(self, alive: Collection[str]) -> None:
        """Decode replicas come and go under ever new names: of those that are not `alive` the newest stay known."""
        names = dict.fromkeys(way.decode for way in (*self._exposed, *self._since))
        gone = set([name for name in names if name not in alive][:-GONE_KEPT])
        for ways in (self._exposed, self._since):
            for way in [way for way in ways if way.decode in gone]:
                del ways[way]
        for name in gone:
            self._prefill.pop(f"@{name}", None)
            self._service.pop(f"@{name}", None)

    def estimate(self, way: Way, tokens: int, held_tokens: int, token_bytes: int, ahead: float) -> Estimate:
        """`held_tokens` of the prompt are on the decode replica; `ahead` prompts per replica wait or run before it."""
        who = _who(way)
        missing = max(0, tokens - held_tokens)
        prefill = self._prefill.get(who, Curve()).at(tokens if way.prefill else missing)
        moved = -(-missing // PAGE_TOKENS) * PAGE_TOKENS * token_bytes if way.prefill else 0
        exposed = self._exposed.get(way, Curve()).at(moved)
        return Estimate(way, ahead * self._service.get(who, 0.0), prefill.y, exposed.y, prefill.known and exposed.known)

    def choose(self, estimates: Sequence[Estimate]) -> Estimate:
        """The way to take: one not known yet, now and then one that lost narrowly, else the fastest.

        Raises ValueError when there is none.
        """
        fastest = min((e.total_ms for e in estimates if e.known), default=float("inf"))
        close = [e for e in estimates if e.total_ms <= RETRY_WITHIN * fastest]
        chosen = next((e for e in close if not e.known), None) or self._doubtful(close, fastest)
        chosen = chosen or min(estimates, key=lambda e: e.total_ms)
        for estimate in estimates:
            self._since[estimate.way] = 0 if estimate is chosen else self._since.get(estimate.way, 0) + 1
        return chosen

    def _doubtful(self, close: Sequence[Estimate], fastest: float) -> Estimate | None:
        lost = (e for e in close if e.total_ms > fastest)
        return next((e for e in lost if self._since.get(e.way, 0) >= RETRY_EVERY), None)


def explain(estimates: Sequence[Estimate], chosen: Estimate) -> list[Mapping[str, object]]:
    """What `choose` saw, the chosen way first, then by cost: for people and their tools."""
    order = sorted(estimates, key=lambda e: (e is not chosen, e.total_ms))
    return [
        {
            "way": str(e.way),
            "chosen": e is chosen,
            "known": e.known,
            "total_ms": round(e.total_ms, 1),
            "queue_ms": round(e.queue_ms, 1),
            "prefill_ms": round(e.prefill_ms, 1),
            "exposed_ms": round(e.exposed_ms, 1),
        }
        for e in order
    ]


def _who(way: Way) -> str:
    """Whose compute it is: an engine's (its replicas share a queue) or one replica's own."""
    return way.prefill or f"@{way.decode}"


def _ratio(a: float, b: float) -> float:
    small, large = sorted((max(a, 1.0), max(b, 1.0)))
    return large / small


def _around(points: Sequence[tuple[float, float]], x: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """The two neighbours of x, or the outermost two on its side."""
    right = next((i for i, (px, _) in enumerate(points) if px >= x), len(points) - 1)
    right = max(1, right)
    return points[right - 1], points[right]
