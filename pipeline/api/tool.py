"""Tool: the functions a client offers: how the prompt tells of them, and how calls of them are written and read.

A model whose chat template knows tools is told by the template and read in the way it was trained to write. One whose
template does not is told by a system message of ours, and its calls and results become text of ours. A call that must
come is forced by a grammar, so it works with any model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import grammar
from pipeline.api.call import BareCalls, GivenCall, TaggedCalls
from pipeline.api.delta import PlainReader, Reader
from pipeline.api.schemas import ChatAsk, Tool
from pipeline.api.text import Text

Message = Mapping[str, Any]
_TAG = "<tool_call>"
_PROMPT = """\
You can call functions. To call one, write one JSON object between tags, like this:
<tool_call>
{"name": "the function's name", "arguments": {"parameter": "value"}}
</tool_call>
Call a function only when it helps to answer; its result is given to you between <tool_response> tags.
These are the functions, one JSON object in each line:
"""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request that may be called; empty when there are none or none may be called.

    `forced`: a tool's name, "required" for any of them, or None.
    """

    tools: tuple[Tool, ...]
    forced: str | None
    parallel: bool

    @classmethod
    def of(cls, ask: ChatAsk) -> Toolbox:
        tools = () if ask.tool_choice == "none" else tuple(ask.tools or ())
        return cls(tools, ask.forced, ask.parallel_tool_calls is not False)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)

    @property
    def shown(self) -> list[dict[str, Any]]:
        """As templates expect them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def grammar(self) -> str | None:
        """What the text must match when a call must come: a list of calls, or the arguments of the one tool."""
        if self.forced is None:
            return None
        if self.forced != "required":
            return grammar.encode(
                "json_schema", next(_arguments(t) for t in self.tools if t.function.name == self.forced)
            )
        calls = [_call(tool, f"#/items/anyOf/{index}/properties/arguments") for index, tool in enumerate(self.tools)]
        most = {} if self.parallel else {"maxItems": 1}
        return grammar.encode("json_schema", {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}})

    def reader(self, text: Text) -> Reader:
        """What makes calls of the text that the model will write."""
        if not self.tools:
            return PlainReader()
        if self.forced == "required":
            return BareCalls(self.names, parallel=self.parallel)
        if self.forced:
            return GivenCall(self.forced)
        tagged = _TAG in text.template or not text.reads("tools")
        return (TaggedCalls if tagged else BareCalls)(self.names, parallel=self.parallel)


def told(messages: Sequence[Message], toolbox: Toolbox, text: Text) -> list[Message]:
    """The messages for a template that knows no tools, as `_PROMPT` describes them; for others as they are."""
    if text.reads("tools"):
        return list(messages)
    found = [_as_text(message) for message in messages]
    if not toolbox.tools:
        return found
    prompt = _PROMPT + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in toolbox.shown)
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{prompt}"}, *found[1:]]
    return [{"role": "system", "content": prompt}, *found]


def _as_text(message: Message) -> Message:
    """Calls and results as the model writes and reads them."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(f"<tool_call>\n{_written(each['function'])}\n</tool_call>" for each in message["tool_calls"])
    content = f"{message['content']}\n{calls}" if message["content"] else calls
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return json.dumps(call, ensure_ascii=False)


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments; one that says nothing allows any object."""
    schema = tool.function.parameters or {}
    return schema if "type" in schema or "$ref" in schema or "anyOf" in schema else {"type": "object", **schema}


def _call(tool: Tool, place: str) -> dict[str, Any]:
    """The schema of one call. References inside the tool's own schema follow it to its `place`."""
    arguments = _moved(_arguments(tool), place)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _reference(key, value, place) for key, value in schema.items()}


def _reference(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    return _moved(value, place)
