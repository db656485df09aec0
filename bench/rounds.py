"""Rounds: as many as fit into a time, and never fewer than a number makes sense of.

A round takes one sample of everything that is compared, so what is there when the time is over is balanced.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator


def until(end_s: float, fewest: int, now: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Numbers of rounds, from 0. After the `fewest` first, one begins only if it would be over at `end_s` of the clock
    `now` should it take as long as the longest so far."""
    longest_s, number = 0.0, 0
    while number < fewest or now() + longest_s <= end_s:
        start = now()
        yield number
        longest_s, number = max(longest_s, now() - start), number + 1


def arguments(parser: argparse.ArgumentParser, seconds: float, fewest: int) -> None:
    """How long a bench with rounds may take."""
    parser.add_argument("--seconds", type=float, default=seconds, help="of everything, systems' starts included")
    parser.add_argument("--fewest", type=int, default=fewest, help="rounds, however long they take")
