"""Stop strings over streamed text.

Rule: text is held back only while it could still become a stop, that is the longest suffix which is a proper
prefix of some stop string. When several stops occur, the one that starts earliest wins; at one start, the shortest.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.api.delta import overlap


class StopMatcher:
    """Feed text pieces in order; a stop may span any number of them. `include` keeps the stop in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None  # the stop that was found; nothing may be fed afterwards

    def feed(self, piece: str) -> str:
        """Text that may leave now. After a match: the text before the stop (and the stop, when included)."""
        if not self._stops:
            return piece
        text = self._held + piece
        if found := self._find(text):
            at, self.matched = found
            self._held = ""
            return text[: at + len(self.matched) if self._include else at]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end of the text: what was held back was no stop after all."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Start and text of the winner. A stop that starts earlier but is not complete yet does not count: to wait
        for it would let a text run on that has met a stop."""
        found = [(at, len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        at, _, stop = min(found)
        return at, stop
