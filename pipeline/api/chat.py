"""`POST /v1/chat/completions`: messages to a prompt, and the objects of its answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from fastapi import Request

from pipeline import routing
from pipeline.api import body, plan, schemas
from pipeline.api.answer import JSON, Answer, Head
from pipeline.api.edge import Edge
from pipeline.api.relay import Choice, Relay
from pipeline.api.schemas import ChatAsk, ChatMessage, Part, ToolCall
from pipeline.api.served import Served
from pipeline.errors import InvalidParameterError

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


async def create(edge: Edge, http: Request) -> Answer:
    """Everything that can be refused is refused here, before a job exists."""
    ask = schemas.read(ChatAsk, await body.read_object(http, edge.settings.max_body_bytes))
    served = edge.models.find(ask.model)
    _require_few(ask, edge.settings.max_messages)
    wish = routing.parse(http.headers.get(routing.HEADER))
    choice = await to_thread.run_sync(_choice, edge, served, ask, plan.salt(http, ask))
    assert choice.request is not None
    shape = ChatShape(f"chatcmpl-{choice.request.handoff_id}", edge.now(), served)
    telling = plan.telling(http, ask, shape, edge.pace)
    return Answer(Relay(edge.backend, served, [choice], wish, traced=telling.traced), telling)


def _require_few(ask: ChatAsk, limit: int) -> None:
    if len(ask.messages) > limit:
        raise InvalidParameterError("messages", f"`messages` may hold at most {limit} messages.")


def _choice(edge: Edge, served: Served, ask: ChatAsk, salt: str) -> Choice:
    """Rendering and tokenising a long prompt takes a while: this runs beside the event loop."""
    token_ids = prompt(ask, served)
    return plan.choice(ask, served, token_ids, _max_tokens(ask, edge), salt=salt, param="messages")


def _max_tokens(ask: ChatAsk, edge: Edge) -> int:
    wanted = ask.wanted_tokens
    if wanted == 0:
        param = "max_tokens" if ask.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidParameterError(param, f"`{param}` must be at least 1.")
    return edge.settings.default_max_tokens if wanted is None else wanted


def prompt(ask: ChatAsk, served: Served) -> list[int]:
    """Token ids of the rendered chat. The template writes the special tokens, the tokeniser adds none."""
    go_on = bool(ask.continue_final_message)
    text = served.text.render(
        plain(ask.messages),
        add_generation_prompt=not go_on if ask.add_generation_prompt is None else ask.add_generation_prompt,
        continue_final_message=go_on,
        options=ask.chat_template_kwargs,
    )
    return served.text.encode(text, add_special_tokens=bool(ask.add_special_tokens))


def plain(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, `developer` as `system`, call arguments as objects."""
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: ChatMessage, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message, path),
    }
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    return found


def _content(message: ChatMessage, path: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise InvalidParameterError(f"{path}.content", f"`{path}.content` must be a text or a list of text parts.")
    return "\n".join(_part(part, f"{path}.content[{index}]") for index, part in enumerate(message.content))


def _part(part: Part, path: str) -> str:
    if part.type not in _TEXT_PARTS | {"refusal"}:
        message = f"Content of type `{part.type}` is not supported: this model reads text only."
        raise InvalidParameterError(f"{path}.type", message, code="unsupported_content")
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidParameterError(f"{path}.{name}", f"`{path}.{name}` is missing.")
    return text


def _call(call: ToolCall) -> dict[str, Any]:
    """Templates print arguments themselves, so they get the object behind the JSON text."""
    found = call.model_dump()
    arguments = found["function"].get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a model wrote it: what is no JSON is shown as it was
            found["function"]["arguments"] = json.loads(arguments)
    return found


@dataclass(frozen=True, slots=True)
class ChatShape(Head):
    """`chat.completion` and its chunks: the role once, first; text; an empty delta with the finish."""

    def head(self, *, stream: bool) -> JSON:
        return self.of("chat.completion.chunk" if stream else "chat.completion")

    def opening(self, index: int) -> JSON:
        return _delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str) -> JSON:
        return _delta(index, {"content": text})

    def closing(self, index: int, finish: str) -> JSON:
        return _delta(index, {}, finish)

    def whole(self, index: int, text: str, finish: str) -> JSON:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}


def _delta(index: int, delta: JSON, finish: str | None = None) -> JSON:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
