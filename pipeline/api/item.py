"""Item: an answer as the Responses API tells it: reasoning, a message and function calls, each an item of its own.

In a stream every item is opened, told in pieces and closed again, in order; the last event repeats all of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.api.answer import JSON
from pipeline.api.chunk import usage
from pipeline.api.delta import CallArguments, CallBegin, Content, Delta, Reader, Reasoning, merge
from pipeline.api.errors import Problem
from pipeline.api.relay import Event, Relay


class Item:
    """One item while it is told. `text` is its text, or a call's arguments."""

    kind = ""
    prefix = ""

    def __init__(self) -> None:
        self.item_id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.text = ""

    def shown(self, status: str) -> JSON:
        return {"id": self.item_id, "type": self.kind, "status": status}

    def opened(self) -> list[JSON]:
        """Events after the one that adds the item."""
        return []

    def piece(self, text: str) -> JSON:
        raise NotImplementedError

    def closed(self) -> list[JSON]:
        """Events in front of the one that ends the item."""
        raise NotImplementedError


class Message(Item):
    kind, prefix = "message", "msg"

    def shown(self, status: str) -> JSON:
        return {**super().shown(status), "role": "assistant", "content": [self._part()] if self.text else []}

    def _part(self) -> JSON:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def opened(self) -> list[JSON]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def piece(self, text: str) -> JSON:
        return {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": []}

    def closed(self) -> list[JSON]:
        return [
            {"type": "response.output_text.done", "content_index": 0, "text": self.text, "logprobs": []},
            {"type": "response.content_part.done", "content_index": 0, "part": self._part()},
        ]


class Thought(Item):
    kind, prefix = "reasoning", "rs"

    def shown(self, status: str) -> JSON:
        content = [{"type": "reasoning_text", "text": self.text}] if self.text else []
        return {**super().shown(status), "summary": [], "content": content}

    def piece(self, text: str) -> JSON:
        return {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def closed(self) -> list[JSON]:
        return [{"type": "response.reasoning_text.done", "content_index": 0, "text": self.text}]


class Call(Item):
    kind, prefix = "function_call", "fc"

    def __init__(self, call: CallBegin) -> None:
        super().__init__()
        self._call = call

    def shown(self, status: str) -> JSON:
        named = {"call_id": self._call.call_id, "name": self._call.name}
        return {**super().shown(status), **named, "arguments": self.text}

    def piece(self, text: str) -> JSON:
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def closed(self) -> list[JSON]:
        done = {"name": self._call.name, "arguments": self.text}
        return [{"type": "response.function_call_arguments.done", **done}]


class ItemTeller:
    """Tells one choice. `head` is the response object without what depends on the answer.

    `measure` counts the tokens of a text.
    """

    named = True
    trailer = b""

    def __init__(self, head: JSON, reader: Reader, measure: Callable[[str], int]) -> None:
        self._head = head
        self._reader = reader
        self._measure = measure
        self._count = 0
        self._items: list[Item] = []
        self._open: Item | None = None

    def opening(self, relay: Relay) -> list[JSON]:
        response = self._response("in_progress", None)
        return [
            self._event({"type": "response.created", "response": response}),
            self._event({"type": "response.in_progress", "response": response}),
        ]

    def told(self, event: Event, relay: Relay) -> list[JSON]:
        found = [each for delta in self._read(event) for each in self._tell(delta)]
        return [*found, *self._close(_status(event.finish))] if event.finish else found

    def ending(self, relay: Relay) -> list[JSON]:
        response = self._whole(relay)
        return [self._event({"type": f"response.{response['status']}", "response": response})]

    def whole(self, events: Sequence[Event], relay: Relay) -> JSON:
        [event] = events
        for delta in merge(self._read(event)):
            self._tell(delta)
        self._close(_status(event.finish))
        return self._whole(relay)

    def failed(self, problem: Problem) -> JSON:
        """SDKs raise what is under `error`; the event's own fields are those of the schema."""
        told = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._event({"type": "error", **told, **problem.body})

    def _read(self, event: Event) -> list[Delta]:
        deltas = self._reader.feed(event.text)
        return [*deltas, *self._reader.end()] if event.finish else deltas

    def _tell(self, delta: Delta) -> list[JSON]:
        match delta:
            case CallBegin():
                return self._start(Call(delta))
            case CallArguments(_, text):
                return self._piece(text)
            case Content(text):
                return [*([] if isinstance(self._open, Message) else self._start(Message())), *self._piece(text)]
            case Reasoning(text):
                return [*([] if isinstance(self._open, Thought) else self._start(Thought())), *self._piece(text)]

    def _start(self, item: Item) -> list[JSON]:
        closed = self._close("completed")
        self._open = item
        self._items.append(item)
        added = {"type": "response.output_item.added", "item": item.shown("in_progress")}
        return [*closed, self._of_item(added), *map(self._of_item, item.opened())]

    def _piece(self, text: str) -> list[JSON]:
        assert self._open is not None
        self._open.text += text
        return [self._of_item(self._open.piece(text))]

    def _close(self, status: str) -> list[JSON]:
        if self._open is None:
            return []
        closed = [self._of_item(each) for each in self._open.closed()]
        done = self._of_item({"type": "response.output_item.done", "item": self._open.shown(status)})
        self._open = None
        return [*closed, done]

    def _of_item(self, event: JSON) -> JSON:
        """An event of the open item: which one it is stands in each."""
        assert self._open is not None
        place: JSON = {"output_index": len(self._items) - 1}
        if "item" not in event:
            place["item_id"] = self._open.item_id
        return self._event({**event, **place})

    def _event(self, event: JSON) -> JSON:
        numbered = {**event, "sequence_number": self._count}
        self._count += 1
        return numbered

    def _whole(self, relay: Relay) -> JSON:
        [finish] = relay.finishes
        thoughts = sum(self._measure(item.text) for item in self._items if isinstance(item, Thought))
        return self._response(_status(finish), _usage(relay, thoughts))

    def _response(self, status: str, counted: JSON | None) -> JSON:
        """The last item is as complete as the response; what is in front of it is complete."""
        ends = ["completed"] * (len(self._items) - 1) + [status]
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.shown(end) for item, end in zip(self._items, ends, strict=False)],
            "usage": counted,
        }


def _status(finish: str | None) -> str:
    return "incomplete" if finish == "length" else "completed"


def _usage(relay: Relay, thoughts: int) -> dict[str, Any]:
    """`thoughts`: their tokens, cut anew, without the tags around them; a model may have written the text in more."""
    counted = usage(relay.prompts)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},  # not counted here
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": min(thoughts, counted["completion_tokens"])},
        "total_tokens": counted["total_tokens"],
    }
