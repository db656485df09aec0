"""Cores: one machine plays two. The decode engine gets a core of its own, everything else shares the others.

Without that, D alone has the whole machine, and D in a handoff shares it with P: a comparison of how many processes
there are, not of what a handoff costs. Linux, with two cores at least.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from bench import process


def can_part() -> bool:
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


def part(chosen: Iterable[int]) -> None:
    """The processes `chosen` on the last core; we and everything else that we have started on the rest."""
    *rest, last = sorted(os.sched_getaffinity(0))
    chosen = set(chosen)
    for pid in {os.getpid(), *process.below(os.getpid())}:
        pin(pid, {last} if pid in chosen else set(rest))


def pin(pid: int, cores: set[int]) -> None:
    """Every thread there is; those to come begin where the thread is that starts them."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # it has ended
            continue
