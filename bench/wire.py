"""Wire: what a shaped link carries, by plain TCP from its far end. Every other rate over it is compared with that."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Mapping

from bench import stream
from bench.link import Link
from bench.pair import Pair
from bench.stream import Task

PAGES = 24
REPEATS = 3


def rates(made: Link, shaped: Mapping[str, float]) -> dict[str, float]:
    """Bytes/s for each shape's name; `shaped` has what the kernel is told. The last one stays."""
    found = {}
    with Pair(made.enter) as pair:
        for name, rate in shaped.items():
            made.reshape(rate)
            task = Task("", PAGES, 0, uuid.uuid4().hex, link=made)
            runs = [pair.measure(stream.TCP, stream.TRANSPORTS[stream.TCP], task) for _ in range(REPEATS)]
            found[name] = statistics.median(run.moved_bytes / run.wall_s for run in runs)
    return found
