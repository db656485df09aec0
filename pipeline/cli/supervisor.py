"""Supervisor: brings back a process that ended by itself, later each time, and gives up on one that keeps ending."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pipeline.cli.fleet import API

FIRST_S = 1.0  # before the first restart; each further one waits twice as long
LONGEST_S = 30.0
STEADY_S = 60.0  # whoever ran for this long begins anew
ATTEMPTS = 5  # restarts in a row


class Process(Protocol):
    """What is looked after; a `Child` is one."""

    @property
    def name(self) -> str: ...

    def epitaph(self) -> str: ...


P = TypeVar("P", bound=Process)


class Processes(Protocol[P]):
    """Whom they belong to; a `Fleet` is one."""

    @property
    def serves(self) -> bool: ...

    def dead(self) -> list[P]: ...

    def restart(self, each: P) -> object: ...

    def bury(self, each: P) -> None: ...


@dataclass(slots=True)
class _Past:
    """Of one name: when it was started last, restarts in a row, and when the next one is due."""

    started: float
    restarts: int = 0
    due: float | None = None
    given_up: bool = False


class Supervisor(Generic[P]):
    """Call `tend` about twice a second."""

    def __init__(
        self, processes: Processes[P], say: Callable[[str], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._processes = processes
        self._say = say
        self._now_s = now_s
        self._begun = now_s()
        self._pasts: dict[str, _Past] = {}

    def tend(self) -> bool:
        """One look at every process. False when nothing serves and nothing will come back."""
        for each in self._processes.dead():
            self._attend(each)
        return self._processes.serves or any(past.due is not None for past in self._pasts.values())

    def _attend(self, each: P) -> None:
        past, now = self._pasts.setdefault(each.name, _Past(self._begun)), self._now_s()
        if past.due is None:
            self._plan(each, past, now)
        elif now >= past.due:
            past.due, past.started = None, now
            self._say(f"{each.name} is started again")
            self._processes.restart(each)

    def _plan(self, each: P, past: _Past, now: float) -> None:
        """It has just ended."""
        if past.given_up:
            return
        self._say(each.epitaph())
        if now - past.started >= STEADY_S:
            past.restarts = 0
        if past.restarts == ATTEMPTS:
            self._say(f"{each.name} ended {ATTEMPTS + 1} times in a row and is given up: see its log, then start anew")
            past.given_up = True
            if each.name != API:
                self._processes.bury(each)
            return
        wait_s = min(LONGEST_S, FIRST_S * 2**past.restarts)
        past.restarts += 1
        past.due = now + wait_s
        self._say(f"{each.name} will be started again in {wait_s:g} s")
