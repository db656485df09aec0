"""Pair: sender and receiver of a transfer, each a process of its own: neither waits for the other's interpreter.

Standard library only: it also runs where Crossfill is not installed (`bench.peer`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Self

# Takes the task and a pipe to the other side. What comes before the `yield` is not measured. Returns the payload bytes
# that were moved.
Side = Callable[[Any, Any], Generator[None, None, int]]
Sides = tuple[Side, Side]  # sender, receiver; functions of a module


@dataclass(frozen=True, slots=True)
class Measured:
    """One transfer, and the CPU of both sides. `wire_bytes`: after the codec."""

    moved_bytes: int
    wall_s: float
    cpu_s: float
    wire_bytes: int


class Pair:
    """Two processes that run one transfer after another; the sender calls `enter` first, if there is one."""

    def __init__(self, enter: Callable[[], None] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._sides = []
        ends = context.Pipe()
        for end, first in zip(ends, (enter, None), strict=True):
            ours, theirs = context.Pipe()
            side = context.Process(target=_serve, args=(first, end, theirs), daemon=True)
            side.start()
            theirs.close()
            self._sides.append((side, ours))
        for end in ends:
            end.close()

    def measure(self, name: str, sides: Sides, task: Any) -> Measured:
        """Move `task`, which has `total_bytes`. Raises RuntimeError when a side fails, and unless what was sent is what
        was received; the pair is then over."""
        for (_, tasks), side in zip(self._sides, sides, strict=True):
            tasks.send((side, task))
        results: dict[Any, Any] = {}
        while len(results) < len(self._sides):  # whoever fails leaves the other one waiting
            for ready in wait([tasks for _, tasks in self._sides if tasks not in results]):
                results[ready] = _result(name, ready)
        sent, received = taken = [results[tasks] for _, tasks in self._sides]
        if sent[0] != received[0]:
            raise RuntimeError(f"{name}: {sent[0]} bytes sent, {received[0]} received")
        begin_s, end_s = min(each[1] for each in taken), max(each[2] for each in taken)
        return Measured(task.total_bytes, end_s - begin_s, sum(each[3] for each in taken), sent[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for side, tasks in self._sides:
            tasks.close()
            side.kill()  # it has nothing to put in order
            side.join()


def _result(name: str, tasks: Any) -> Any:
    try:
        result = tasks.recv()
    except EOFError:
        result = "its process ended"
    if isinstance(result, str):
        raise RuntimeError(f"{name}: one side failed: {result}")
    return result


def _serve(enter: Callable[[], None] | None, peer: Any, tasks: Any) -> None:
    """One side, until it fails or is no longer asked."""
    if enter:
        enter()
    with contextlib.suppress(EOFError):  # the bench is over
        _answer(peer, tasks)


def _answer(peer: Any, tasks: Any) -> None:
    """Each task with (bytes, begin, end, CPU seconds), by the host's monotonic clock."""
    while True:
        side, task = tasks.recv()
        try:
            tasks.send(_timed(side(task, peer), peer))
        except Exception as error:
            tasks.send(f"{type(error).__name__}: {error}")
            return


def _timed(steps: Generator[None, None, int], peer: Any) -> tuple[int, float, float, float]:
    next(steps)
    peer.send("ready")
    peer.recv()
    begin_s, cpu_s, moved = time.monotonic(), time.process_time(), 0
    try:
        next(steps)
    except StopIteration as done:
        moved = done.value
    return moved, begin_s, time.monotonic(), time.process_time() - cpu_s
