"""Run: a crowd, a nemesis and a history on one rig, then the judgement."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.chaos.crowd import Crowd
from tests.chaos.history import History, Summary, summary, violations
from tests.chaos.nemesis import Nemesis, plan
from tests.faults.call import PATIENCE_S
from tests.faults.rig import API, Rig


class Verdict(NamedTuple):
    """`violations` is empty when every invariant held."""

    violations: list[str]
    summary: Summary


def run(
    rig: Rig, seed: int, file: Path, *, seconds: float, requests: int, clients: int = 6, pace_s: float = 1.5
) -> Verdict:
    """Until `requests` are done or `seconds` have passed; then the system must come to rest."""
    history = History(file)
    workers = tuple(sorted(name for name in rig.hops if name != API))
    crowd = Crowd(rig, history, seed, clients, requests)
    nemesis = Nemesis(rig, plan(seed, workers, pace_s), history)
    try:
        crowd.join(seconds)
    finally:
        nemesis.stop()
        rig.mend()
        crowd.stop()
        history.close()
    found = violations(history.lines, PATIENCE_S)
    try:
        rig.rest()
    except AssertionError as error:
        found.append(f"I1-I3, I6, I7: at rest: {error}")
    return Verdict(found, summary(history.lines))
