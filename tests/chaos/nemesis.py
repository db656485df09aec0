"""Nemesis: what is done to the system, and when. Everything is drawn from one random generator; nothing looks at the
system, so a seed is the same plan every time (when things happen within the system is not)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipeline.broker import scripts
from tests.chaos.history import History
from tests.faults.rig import API, Rig
from tests.proxy import Faults

LOSABLE = ("reserve", "header", "imported", "fence", "enter", "advance", "emit", "leave", "release")
# kind -> how often, relative to the others
WEIGHTS = {
    "kill": 5, "pause": 5, "cut": 4, "reset": 5, "black_hole": 4, "slow": 5, "lose": 6, "unsubscribe": 4,
    "kill_api": 1, "restart_broker": 1,
}  # fmt: skip


class Fault(NamedTuple):
    """`kind` happens to `target` `after_s` seconds after the one before, and ends by itself after `lasts_s`."""

    after_s: float
    kind: str
    target: str
    lasts_s: float
    number: int


def plan(seed: int, workers: tuple[str, ...], pace_s: float) -> Iterator[Fault]:
    """Without end."""
    rng = random.Random(seed)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while True:
        (kind,) = rng.choices(kinds, weights)
        target = API if kind == "kill_api" else rng.choice((*workers, *workers, API) if kind in _ANY else workers)
        yield Fault(rng.expovariate(1 / pace_s), kind, target, rng.uniform(0.2, 6.0), rng.getrandbits(16))


_ANY = {"cut", "reset", "slow", "lose", "black_hole"}


class Nemesis:
    """Carries out a plan on a thread of its own. `stop` ends it and everything it began."""

    def __init__(self, rig: Rig, faults: Iterator[Fault], history: History) -> None:
        self._rig = rig
        self._faults = faults
        self._history = history
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nemesis")
        self._doing: list[threading.Thread] = []
        self._busy: set[str] = set()  # processes that something is being done to
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        for one in self._doing:
            one.join()

    def _run(self) -> None:
        for fault in self._faults:
            if self._stop.wait(fault.after_s):
                return
            self._supervise()
            if fault.target in self._busy or (fault.kind == "restart_broker" and "broker" in self._busy):
                continue
            self._history.note("fault", kind=fault.kind, target=fault.target, lasts_s=round(fault.lasts_s, 3))
            self._busy.add("broker" if fault.kind == "restart_broker" else fault.target)
            self._doing = [one for one in self._doing if one.is_alive()]
            self._doing.append(threading.Thread(target=self._carry_out, args=(fault,)))
            self._doing[-1].start()

    def _supervise(self) -> None:
        """Start again what ended by itself, as a supervisor would: a process refuses to start without a broker."""
        for each in self._rig.crew.children:
            if each.name not in self._busy and each.status is not None:
                self._history.note("supervisor", name=each.name, status=each.status)
                self._rig.crew.revive(each.name)

    def _carry_out(self, fault: Fault) -> None:
        try:
            _DEEDS[fault.kind](self, fault)
        except Exception as error:  # a process that ended meanwhile cannot be resumed
            self._history.note("nemesis", kind=fault.kind, target=fault.target, error=repr(error))
        finally:
            self._busy -= {"broker" if fault.kind == "restart_broker" else fault.target}

    def _kill(self, fault: Fault) -> None:
        self._rig.kill(fault.target)
        self._stop.wait(fault.lasts_s)
        self._rig.revive(fault.target)

    def _pause(self, fault: Fault) -> None:
        self._rig.pause(fault.target)
        self._stop.wait(fault.lasts_s)
        self._rig.resume(fault.target)

    def _cut(self, fault: Fault) -> None:
        self._rig.hops[fault.target].cut()
        self._stop.wait(min(1.5, fault.lasts_s))
        self._rig.hops[fault.target].mend()

    def _reset(self, fault: Fault) -> None:
        self._rig.hops[fault.target].reset()

    def _black_hole(self, fault: Fault) -> None:
        self._apply(fault, Faults(black_hole=True))

    def _slow(self, fault: Fault) -> None:
        slow = Faults(latency_s=fault.number % 50 / 1000, bytes_per_s=2e5 + 50 * fault.number, piece_bytes=2048)
        self._apply(fault, slow)

    def _apply(self, fault: Fault, faults: Faults) -> None:
        self._rig.hops[fault.target].apply(faults)
        self._stop.wait(fault.lasts_s)
        self._rig.hops[fault.target].mend()

    def _lose(self, fault: Fault) -> None:
        """The reply of one script, at the next chance."""
        source = scripts.source(LOSABLE[fault.number % len(LOSABLE)])
        sha = self._rig.broker.script_load(source).encode()
        self._rig.hops[fault.target].lose(sha)
        self._stop.wait(fault.lasts_s)
        self._rig.hops[fault.target].lose(sha, times=0)

    def _unsubscribe(self, fault: Fault) -> None:
        self._rig.broker.client_kill_filter(_type="pubsub")

    def _restart_broker(self, fault: Fault) -> None:
        self._rig.server.stop()
        self._stop.wait(min(2.0, fault.lasts_s))
        self._rig.server.start()


_DEEDS: dict[str, Callable[[Nemesis, Fault], None]] = {
    "kill": Nemesis._kill,
    "kill_api": Nemesis._kill,
    "pause": Nemesis._pause,
    "cut": Nemesis._cut,
    "reset": Nemesis._reset,
    "black_hole": Nemesis._black_hole,
    "slow": Nemesis._slow,
    "lose": Nemesis._lose,
    "unsubscribe": Nemesis._unsubscribe,
    "restart_broker": Nemesis._restart_broker,
}
