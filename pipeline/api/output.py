"""Output: one choice's token ids becoming text: detokenise, cut at stop strings, count.

Stream and non-stream answers take the same path, so their texts are equal by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.api.stop import StopMatcher
from pipeline.api.text import Detokeniser
from pipeline.logprob import TokenLogprob


class Told(NamedTuple):
    """A token whose log-probability is told; its text starts `offset` characters into the answer."""

    token: TokenLogprob
    offset: int


class Piece(NamedTuple):
    """Text that may leave, and the tokens it came from where log-probabilities were asked for."""

    text: str
    tokens: tuple[Told, ...] = ()


class Output:
    """`tokens` counts what D emitted, the end-of-sequence or stop token included, up to the one that completed a
    stop string; `finish` is set by the last `feed`.

    A token is told once the first character of its text has left, so none of a stop string that is not shown is.
    """

    def __init__(self, detokeniser: Detokeniser, matcher: StopMatcher, *, include_stop: bool = False) -> None:
        self._detokeniser = detokeniser
        self._matcher = matcher
        self._include_stop = include_stop
        self._made = 0  # characters that came out of the tokens
        self._shown = 0  # and how many of them have left
        self._waiting: list[Told] = []
        self.tokens = 0
        self.finish: str | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was found: the text has ended, whatever D still says."""
        return self._matcher.matched is not None

    def feed(
        self, token_ids: Sequence[int], finish: str | None, logprobs: Sequence[TokenLogprob] | None = None
    ) -> Piece:
        """What these tokens release. `finish` as D said it, with its last tokens only."""
        # D ends with "stop" on a stop token, which is its last; its text is not part of the answer.
        silent = 1 if finish == "stop" and not self._include_stop else 0
        text = ""
        for index, token_id in enumerate(token_ids):
            self.tokens += 1
            if index < len(token_ids) - silent:
                if logprobs is not None:
                    self._waiting.append(Told(logprobs[index], self._made))
                text += self._push(token_id)
            if self.stopped:
                self.finish = "stop"
                return self._piece(text)
        return self._piece(text + self._end(finish)) if finish else self._piece(text)

    def _push(self, token_id: int) -> str:
        text = self._detokeniser.push(token_id)
        self._made += len(text)
        return self._matcher.feed(text)

    def _end(self, finish: str) -> str:
        text = self._matcher.feed(self._detokeniser.flush())
        self.finish = "stop" if self.stopped else finish
        return text + self._matcher.flush()

    def _piece(self, text: str) -> Piece:
        self._shown += len(text)
        if not self._waiting:
            return Piece(text)
        ended = self.finish is not None and not self.stopped
        told = [each for each in self._waiting if ended or each.offset < self._shown]
        self._waiting = self._waiting[len(told) :]  # offsets only grow
        return Piece(text, tuple(told))
