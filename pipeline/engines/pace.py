"""Pace: how often the steps of a request are handed on, where an engine steps faster than that can be done.

Every hand-over wakes a job's thread and costs a message, some 0.3 ms of the interpreter that the engine's own thread
needs for its next step: sixteen requests at 3 ms a step would take it all. So a request's steps go together, no more
often than leaves the engine most of it, at ticks that all requests share, which then share round trips too. A step that
takes longer than a tick is handed on at once, and so are the first and the last of a request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from pipeline.engines.base import TokenStep

EACH_S = 0.002  # between ticks, for each request that runs: at 0.3 ms each, a seventh of the time
MOST_S = 0.04  # nobody sees text come in pieces as small as this


def handed_on(
    take: Callable[[], Sequence[TokenStep]], running: Callable[[], int], last: threading.Event
) -> Iterator[TokenStep]:
    """What `take` has waited for, merged, tick by tick; until it comes back with nothing. `running` counts requests."""
    while steps := take():
        tick_s = next_tick(running(), time.monotonic())
        yield from merged(steps)
        await_tick(tick_s, last)


def next_tick(running: int, now_s: float) -> float:
    """When steps taken now may be followed by the next ones. Monotonic seconds, as `now_s`."""
    gap_s = min(MOST_S, EACH_S * max(1, running))
    return (now_s // gap_s + 1) * gap_s


def await_tick(tick_s: float, last: threading.Event) -> None:
    """Sleep until then; not while `last` is set: there is something that others wait for."""
    if (left_s := tick_s - time.monotonic()) > 0:
        last.wait(left_s)


def merged(steps: Iterable[TokenStep]) -> list[TokenStep]:
    """One step for each sample among `steps`, in the order in which they come up; tokens stay in theirs."""
    found: dict[int, TokenStep] = {}
    for step in steps:
        before = found.get(step.sample)
        found[step.sample] = step if before is None else _joined(before, step)
    return list(found.values())


def _joined(first: TokenStep, second: TokenStep) -> TokenStep:
    both = None if first.logprobs is None or second.logprobs is None else first.logprobs + second.logprobs
    return TokenStep(first.token_ids + second.token_ids, second.finish, first.sample, both)
