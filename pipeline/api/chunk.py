"""Chunk: what the objects of chat and text completions have in common, streamed and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.api.answer import DONE, JSON
from pipeline.api.errors import Problem
from pipeline.api.relay import Event, Prompt, Relay
from pipeline.api.served import Served
from pipeline.api.text import Text


@dataclass(frozen=True, slots=True)
class Head:
    """What all objects of one answer have around `choices`. `created` is Unix seconds."""

    answer_id: str
    created: int
    served: Served

    def of(self, kind: str) -> JSON:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
        }


class Counting(NamedTuple):
    """Usage in a stream: in one more chunk, without choices, at the end; and so far, on every chunk."""

    last: bool = False
    running: bool = False


class Chunks:
    """A teller of `choices`. Subclasses say what a choice looks like."""

    named = False
    trailer = DONE
    kind = ""
    chunk_kind = ""

    def __init__(self, head: Head, counting: Counting) -> None:
        self._head = head.of(self.kind)
        self._chunk_head = head.of(self.chunk_kind)
        self._counting = counting
        self.text: Text = head.served.text

    def first_choices(self, count: int) -> list[JSON]:
        """What a stream tells of its choices before any text."""
        return []

    def choices(self, event: Event) -> list[JSON]:
        """The choice objects of a stream that tell one event."""
        raise NotImplementedError

    def whole_choice(self, event: Event) -> JSON:
        """The choice object that tells all of a choice at once."""
        raise NotImplementedError

    def opening(self, relay: Relay) -> list[JSON]:
        return [self._chunk([choice], relay) for choice in self.first_choices(len(relay.finishes))]

    def told(self, event: Event, relay: Relay) -> list[JSON]:
        return [self._chunk([choice], relay) for choice in self.choices(event)]

    def ending(self, relay: Relay) -> list[JSON]:
        return [self._chunk([], relay)] if self._counting.last else []

    def whole(self, events: Sequence[Event], relay: Relay) -> JSON:
        choices = [self.whole_choice(event) for event in events]
        return {**self._head, "choices": choices, "usage": usage(relay.prompts)}

    def failed(self, problem: Problem) -> JSON:
        return problem.body

    def _chunk(self, choices: list[JSON], relay: Relay) -> JSON:
        chunk = {**self._chunk_head, "choices": choices}
        if self._counting.last:
            chunk["usage"] = usage(relay.prompts) if self._counting.running or not choices else None
        return chunk


def usage(prompts: Sequence[Prompt]) -> JSON:
    """Token counts over all prompts; `cached_tokens` are those whose KV the decode engine already held."""
    prompt = sum(each.tokens for each in prompts)
    completion = sum(output.tokens for each in prompts for output in each.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
    }
