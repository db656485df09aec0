"""Returns: pages that are in the engine, their credit not yet given back.

The thread that imports puts them in; whichever thread talks to the page server next takes them and gives them back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Returns:
    """Their sequences. For any number of threads, without a lock: nothing is taken twice."""

    def __init__(self) -> None:
        self._sequences: deque[int] = deque()

    def put(self, sequences: Iterable[int]) -> None:
        self._sequences.extend(sequences)

    def take(self) -> list[int]:
        """All there are, each to one caller only."""
        found = []
        while self._sequences:
            try:
                found.append(self._sequences.popleft())
            except IndexError:  # the other thread was quicker
                break
        return found
