"""History: what was asked, what was done to the system and what came of it, as JSON lines; and the check of it.

The check trusts nothing but the lines: after Jepsen, the run records and a pure function judges.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
# What a client may be told while things break; anything else is a bug of ours.
CLEAN = frozenset(
    {
        "broker_unavailable", "capacity", "overloaded", "no_replica", "worker_lost", "deadline_exceeded", "peer_error",
        "peer_aborted", "page_missing", "engine_failed", "quarantined", "cancelled", "stale_attempt",
        "page_server_unavailable",
    }
)  # fmt: skip


class History:
    """Lines with the seconds since the start. Safe to use from many threads."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self.lines: list[Line] = []

    def note(self, event: str, **fields: Any) -> None:
        with self._lock:
            line = {"t": round(time.monotonic() - self._start, 3), "event": event} | fields
            self.lines.append(line)
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def violations(lines: Iterable[Line], limit_s: float) -> list[str]:
    """What contradicts I4, I5, I8, I9 or I10 in the history of a run."""
    asked: dict[int, Line] = {}
    found, ended = [], Counter[int]()
    for line in lines:
        if line["event"] == "ask":
            asked[line["id"]] = line
        elif line["event"] == "end":
            ended[line["id"]] += 1
            found += [f"request {line['id']}: {why}" for why in _wrongs(asked[line["id"]], line, limit_s)]
        elif line["event"] == "gave up":
            found.append(f"I10: a bystander never got its answer: {line}")
    found += [f"I4: request {number} ended {ended[number]} times" for number in asked if ended[number] != 1]
    return found


def _wrongs(ask: Line, end: Line, limit_s: float) -> list[str]:
    expected, text = ask["expected"], end["text"]
    found = []
    if not expected.startswith(text.rstrip("\ufffd")):
        found.append(f"I5/I8: {text!r} where {expected!r} belongs")
    if end["status"] == 200 and end["ended"] and end["code"] is None and (text, end["finish"]) != (expected, "length"):
        found.append(f"I4: ended with {end['finish']} after {text!r} of {expected!r}")
    if end["code"] is not None and end["code"] not in CLEAN:
        found.append(f"I4: an error nobody should see: {end['code']} ({end['status']})")
    if end["hangs"] or end["t"] - ask["t"] > limit_s:
        found.append(f"I9: took {end['t'] - ask['t']:.0f} s")
    if not (end["ended"] or ask["leaves"] or end["api_died"] or end["refused"]):
        found.append(f"I4: silence: {end}")
    return found


class Summary(NamedTuple):
    """Numbers of a run; durations of right answers in seconds."""

    requests: int
    outcomes: dict[str, int]
    faults: dict[str, int]
    recoveries: dict[str, int]
    p50_s: float
    p99_s: float

    def __str__(self) -> str:
        parts = [f"{self.requests} requests: {_counts(self.outcomes)}", f"faults: {_counts(self.faults)}"]
        parts += [f"recoveries: {_counts(self.recoveries)}"]
        return "\n".join([*parts, f"right answers took {self.p50_s:.2f} s (p50), {self.p99_s:.2f} s (p99)"])


def summary(lines: Iterable[Line]) -> Summary:
    begun: dict[int, float] = {}
    outcomes, faults, recoveries = Counter[str](), Counter[str](), Counter[str]()
    took: list[float] = []
    for line in lines:
        if line["event"] == "ask":
            begun[line["id"]] = line["t"]
        elif line["event"] == "fault":
            faults[line["kind"]] += 1
        elif line["event"] == "end":
            outcomes[_outcome(line)] += 1
            recoveries += Counter(dict.fromkeys(line["recovered"], 1))
            if _outcome(line) == "right":
                took.append(line["t"] - begun[line["id"]])
    took.sort()
    p50, p99 = (took[int(len(took) * share)] if took else 0.0 for share in (0.5, 0.99))
    return Summary(len(begun), dict(outcomes), dict(faults), dict(recoveries), p50, p99)


def _outcome(end: Line) -> str:
    if end["code"]:
        return str(end["code"])
    if end["refused"]:
        return "no API"
    return "right" if end["ended"] else "left or cut off"


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items(), key=lambda item: -item[1])) or "none"
