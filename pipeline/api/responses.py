"""`POST /v1/responses`: the stateless part of the Responses API, as a chat.

What is asked is translated into a chat ask, so every rule of chats holds here; what needs a memory on our side
(`previous_response_id`, conversations, background runs) or a hosted tool is refused by name. Nothing is stored.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field

from pipeline import routing
from pipeline.api import body, chat, plan, schemas
from pipeline.api.answer import JSON, Answer
from pipeline.api.edge import Edge
from pipeline.api.item import ItemTeller
from pipeline.api.relay import Relay
from pipeline.api.schemas import ChatAsk, Salt, Strict, TokenCount
from pipeline.api.served import Served
from pipeline.errors import ContextLengthError, InvalidParameterError

_FORGETFUL = "nothing of an answer is kept here: send the whole conversation in `input`"
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((), _FORGETFUL),
    "conversation": ((), _FORGETFUL),
    "background": ((False,), "answers are given on the connection that asked"),
    "prompt": ((), "there are no stored prompts here"),
    "max_tool_calls": ((), "there are no built-in tools here"),
    "truncation": (("disabled",), "shorten `input` yourself"),
    "n": ((1,), "a response is one answer"),
}
_PASSED = ("model", "temperature", "top_p", "stream", "top_k", "min_p", "seed", "cache_salt", "parallel_tool_calls")
_PARAMS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}


class Format(Strict):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Strict):
    format: Format | None = None


class FunctionTool(Strict):
    """A tool as this API writes it: a function without a level of its own."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChoiceOfTool(Strict):
    type: Literal["function"]
    name: str


class ResponsesAsk(Strict):
    input: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[TokenCount, Field(ge=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChoiceOfTool | None = None
    metadata: Annotated[dict[str, str], Field(fail_fast=True)] | None = None
    cache_salt: Salt | None = None


async def create(edge: Edge, http: Request) -> Answer:
    """Everything that can be refused is refused here, before a job exists."""
    ask, asked = await body.read(http, edge.settings.max_body_bytes, _asks)
    served = edge.models.find(asked.model)
    wish = routing.parse(http.headers.get(routing.HEADER))
    try:
        made = await plan.beside(http, asked, partial(chat.make, edge, served, asked, plan.salt(http, asked)))
    except (InvalidParameterError, ContextLengthError) as error:
        error.param = _param(error.param)
        raise
    teller = ItemTeller(_head(edge, ask, asked, served.name), made.readers[0], _measure(served))
    telling = plan.telling(http, asked, teller, edge.pace)
    return Answer(Relay(edge.backend, served, [made.prompt], wish, traced=telling.traced), telling)


def _measure(served: Served) -> Callable[[str], int]:
    return lambda text: len(served.text.encode(text, add_special_tokens=False))


def _asks(raw: Mapping[str, Any]) -> tuple[ResponsesAsk, ChatAsk]:
    ask = read(raw)
    return ask, as_chat(raw, ask)


def read(raw: Mapping[str, Any]) -> ResponsesAsk:
    """Raises InvalidParameterError."""
    for name, (inert, why) in _REFUSED.items():
        if raw.get(name) is not None and raw[name] not in inert:
            raise InvalidParameterError(name, f"`{name}` is not supported: {why}.", code="unsupported_parameter")
    tools = raw.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            message = f"Tools of type `{kind}` are not supported: describe a `function` of your own."
            raise InvalidParameterError(f"tools[{index}].type", message, code="unsupported_parameter")
    return schemas.read_strict(ResponsesAsk, {name: value for name, value in raw.items() if value is not None})


def as_chat(raw: Mapping[str, Any], ask: ResponsesAsk) -> ChatAsk:
    """The same question as a chat. Raises InvalidParameterError with the path in this API."""
    found: JSON = {name: raw[name] for name in _PASSED if name in raw}
    found["messages"] = _messages(ask)
    found["max_completion_tokens"] = ask.max_output_tokens
    found["response_format"] = _format(ask.text.format) if ask.text and ask.text.format else None
    found["tools"] = [_tool(tool) for tool in ask.tools or ()]
    found["tool_choice"] = _choice(ask.tool_choice)
    try:
        return schemas.read(ChatAsk, found)
    except InvalidParameterError as error:
        error.param = _param(error.param)
        raise


def _messages(ask: ResponsesAsk) -> list[JSON]:
    found: list[JSON] = [{"role": "system", "content": ask.instructions}] if ask.instructions else []
    if isinstance(ask.input, str):
        return [*found, {"role": "user", "content": ask.input}]
    for index, item in enumerate(ask.input):
        _append(found, item, f"input[{index}]")
    return found


def _append(messages: list[JSON], item: JSON, path: str) -> None:
    """Calls that follow one another were one message of the model, as was the text in front of them."""
    match item.get("type", "message"):
        case "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        case "reasoning":
            pass  # what a model thought before is no part of a chat's history
        case other:
            message = f"Items of type `{other}` are not supported."
            raise InvalidParameterError(f"{path}.type", message, code="unsupported_content")


def _format(asked: Format) -> JSON:
    schema = {"name": asked.name, "schema": asked.schema_} if asked.type == "json_schema" else None
    return {"type": asked.type, "json_schema": schema}


def _tool(tool: FunctionTool) -> JSON:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _choice(asked: str | ChoiceOfTool | None) -> str | JSON | None:
    return {"type": "function", "function": {"name": asked.name}} if isinstance(asked, ChoiceOfTool) else asked


def _param(param: str | None) -> str | None:
    """A path of the chat as this API has it."""
    for ours, theirs in _PARAMS.items():
        if param and param.startswith(ours):
            return theirs + param[len(ours) :]
    return param


def _head(edge: Edge, ask: ResponsesAsk, asked: ChatAsk, model: str) -> JSON:
    """All of the response object that does not depend on the answer."""
    choice = ask.tool_choice.model_dump() if isinstance(ask.tool_choice, ChoiceOfTool) else ask.tool_choice
    form = ask.text.format.model_dump(by_alias=True, exclude_none=True) if ask.text and ask.text.format else None
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": edge.now(),
        "model": model,
        "instructions": ask.instructions,
        "max_output_tokens": ask.max_output_tokens,
        "metadata": ask.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": [{"description": None, "parameters": None, "strict": None, **_flat(tool)} for tool in ask.tools or ()],
        "truncation": "disabled",
    }


def _flat(tool: FunctionTool) -> JSON:
    return tool.model_dump(exclude_none=True)
