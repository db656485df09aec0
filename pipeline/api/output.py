"""Output: one choice's token ids becoming text: detokenise, cut at stop strings, count.

Stream and non-stream answers take the same path, so their texts are equal by construction.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.api.stop import StopMatcher
from pipeline.api.text import Detokeniser


class Output:
    """`tokens` counts what D emitted, the end-of-sequence or stop token included, up to the one that completed a
    stop string; `finish` is set by the last `feed`."""

    def __init__(self, detokeniser: Detokeniser, matcher: StopMatcher, *, include_stop: bool = False) -> None:
        self._detokeniser = detokeniser
        self._matcher = matcher
        self._include_stop = include_stop
        self.tokens = 0
        self.finish: str | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was found: the text has ended, whatever D still says."""
        return self._matcher.matched is not None

    def feed(self, token_ids: Sequence[int], finish: str | None) -> str:
        """The text that these tokens release. `finish` as D said it, with its last tokens only."""
        # D ends with "stop" on a stop token, which is its last; its text is not part of the answer.
        silent = 1 if finish == "stop" and not self._include_stop else 0
        text = ""
        for index, token_id in enumerate(token_ids):
            self.tokens += 1
            if index < len(token_ids) - silent:
                text += self._matcher.feed(self._detokeniser.push(token_id))
            if self.stopped:
                self.finish = "stop"
                return text
        return text + self._end(finish) if finish else text

    def _end(self, finish: str) -> str:
        text = self._matcher.feed(self._detokeniser.flush())
        self.finish = "stop" if self.stopped else finish
        return text + self._matcher.flush()
