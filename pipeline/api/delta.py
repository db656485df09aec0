"""Delta: what an answer's text means, piece by piece: content, reasoning, or a call of a tool.

Readers take text as it comes and tell deltas. How the text was cut into pieces changes how deltas are cut, never what
they add up to: a stream and a whole answer are read by the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What a model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the tool `name`; its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta: TypeAlias = Content | Reasoning | CallBegin | CallArguments


class Reader(Protocol):
    def feed(self, text: str) -> list[Delta]: ...

    def end(self) -> list[Delta]:
        """The text is over: what was held back."""
        ...


class PlainReader:
    """All text is content."""

    def feed(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def end(self) -> list[Delta]:
        return []


class ThinkReader:
    """`<think>...</think>` in front of the answer is reasoning; blank lines around it belong to neither.

    `thinking`: the prompt has opened the tag already.
    """

    _OPEN, _CLOSE = "<think>", "</think>"

    def __init__(self, inner: Reader, *, thinking: bool) -> None:
        self._inner = inner
        self._state = "reasoning" if thinking else "start"
        self._held = ""
        self._fresh = True  # nothing but blank space of this part so far

    def feed(self, text: str) -> list[Delta]:
        if self._state == "content":
            return self._content(text)
        self._held += text
        if self._state == "start" and not self._open():
            return self._content(self._take()) if self._state == "content" else []
        return self._reasoning()

    def end(self) -> list[Delta]:
        held = self._take()
        if self._state == "reasoning":
            return [*self._thought(held), *self._inner.end()]
        return [*self._content(held), *self._inner.end()]

    def _open(self) -> bool:
        """Whether the tag has been opened; otherwise the state tells whether it may still be."""
        text = self._held.lstrip()
        if text.startswith(self._OPEN):
            self._held = text[len(self._OPEN) :]
            self._state = "reasoning"
            return True
        if not self._OPEN.startswith(text):
            self._state, self._fresh = "content", False
        return False

    def _reasoning(self) -> list[Delta]:
        before, closed, after = self._held.partition(self._CLOSE)
        if closed:
            self._state, self._held = "content", ""
            told = self._thought(before.rstrip())
            self._fresh = True
            return [*told, *self._content(after)]
        # What may be the tag waits, and blank space in front of it.
        free = self._held[: len(self._held) - overlap(self._held, self._CLOSE)].rstrip()
        self._held = self._held[len(free) :]
        return self._thought(free)

    def _thought(self, text: str) -> list[Delta]:
        text = text.lstrip() if self._fresh else text
        self._fresh = self._fresh and not text
        return [Reasoning(text)] if text else []

    def _content(self, text: str) -> list[Delta]:
        text = text.lstrip() if self._fresh else text
        self._fresh = self._fresh and not text
        return self._inner.feed(text) if text else []

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def merge(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind put together: what a whole answer tells."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if isinstance(delta, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments) and last.index == delta.index:
            merged[-1] = CallArguments(last.index, last.text + delta.text)
        else:
            merged.append(delta)
    return merged
