"""`POST /v1/chat/completions`: messages to a prompt, and the objects of its answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request

from pipeline import routing
from pipeline.api import body, logprobs, plan, schemas, tool
from pipeline.api.answer import JSON, Answer
from pipeline.api.chunk import Chunks, Counting, Head
from pipeline.api.delta import CallArguments, CallBegin, Content, Delta, Reader, Reasoning, ThinkReader, merge
from pipeline.api.edge import Edge
from pipeline.api.output import Told
from pipeline.api.plan import Form
from pipeline.api.relay import Event, Prompt, Relay
from pipeline.api.schemas import ChatAsk, ChatMessage, Part, ToolCall
from pipeline.api.served import Served
from pipeline.api.text import Text
from pipeline.api.tool import Message, Toolbox
from pipeline.errors import InvalidParameterError

_THOUGHT, _THOUGHT_ENDS = "<think>", "</think>"
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


async def create(edge: Edge, http: Request) -> Answer:
    """Everything that can be refused is refused here, before a job exists."""
    ask = await body.read(http, edge.settings.max_body_bytes, partial(schemas.read, ChatAsk))
    served = edge.models.find(ask.model)
    wish = routing.parse(http.headers.get(routing.HEADER))
    made = await plan.beside(http, ask, partial(make, edge, served, ask, plan.salt(http, ask)))
    assert made.prompt.request is not None
    head = Head(f"chatcmpl-{made.prompt.request.handoff_id}", edge.now(), served)
    teller = ChatTeller(head, plan.counting(ask), made.readers, scored=bool(ask.logprobs))
    telling = plan.telling(http, ask, teller, edge.pace)
    return Answer(Relay(edge.backend, served, [made.prompt], wish, traced=telling.traced), telling)


class Made(NamedTuple):
    """A chat ready to be submitted, and who reads the texts of its choices."""

    prompt: Prompt
    readers: list[Reader]


def make(edge: Edge, served: Served, ask: ChatAsk, salt: str) -> Made:
    """Rendering and tokenising a long prompt takes a while: this runs beside the event loop."""
    _require_few(ask, edge.settings.max_messages)
    toolbox = Toolbox.of(ask)
    text = render(ask, served, toolbox)
    token_ids = served.text.encode(text, add_special_tokens=bool(ask.add_special_tokens))
    form = Form(toolbox.grammar, "tools") if toolbox.grammar else None
    prompt = plan.prompt(ask, served, token_ids, _max_tokens(ask, edge), salt=salt, param="messages", form=form)
    assert prompt.request is not None
    forced = prompt.request.sampling.grammar is not None
    thinks = not forced and _THOUGHT_ENDS in served.text.template  # a text that a grammar forces holds no thoughts
    thinking = thinks and _opens_thought(ask, served, toolbox, text)
    return Made(prompt, [_reader(served.text, toolbox, thinks, thinking) for _ in prompt.outputs])


def _reader(text: Text, toolbox: Toolbox, thinks: bool, thinking: bool) -> Reader:
    inner = toolbox.reader(text)
    return ThinkReader(inner, thinking=thinking) if thinks else inner


def _opens_thought(ask: ChatAsk, served: Served, toolbox: Toolbox, prompt: str) -> bool:
    """Whether the text begins inside a thought. The template opens it, or a message that is gone on with; other
    messages and tools may hold the tag and open nothing."""
    if not _is_open(prompt):
        return False
    told = tool.told(plain(ask.messages), toolbox, served.text)
    kept = 1 if ask.continue_final_message else 0
    untagged = [{**message, "content": message["content"].replace(_THOUGHT, "")} for message in told]
    return _is_open(_rendered(ask, served, toolbox, [*untagged[: len(told) - kept], *told[len(told) - kept :]], None))


def _is_open(prompt: str) -> bool:
    return prompt.rfind(_THOUGHT) > prompt.rfind(_THOUGHT_ENDS)


def _require_few(ask: ChatAsk, limit: int) -> None:
    if len(ask.messages) > limit:
        raise InvalidParameterError("messages", f"`messages` may hold at most {limit} messages.")


def _max_tokens(ask: ChatAsk, edge: Edge) -> int:
    wanted = ask.wanted_tokens
    if wanted == 0:
        param = "max_tokens" if ask.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidParameterError(param, f"`{param}` must be at least 1.")
    return edge.settings.default_max_tokens if wanted is None else wanted


def prompt(ask: ChatAsk, served: Served) -> list[int]:
    """Token ids of the rendered chat."""
    text = render(ask, served, Toolbox.of(ask))
    return served.text.encode(text, add_special_tokens=bool(ask.add_special_tokens))


def render(ask: ChatAsk, served: Served, toolbox: Toolbox) -> str:
    """The prompt's text. The template writes the special tokens, the tokeniser adds none."""
    told = tool.told(plain(ask.messages), toolbox, served.text)
    return _rendered(ask, served, toolbox, told, toolbox.shown or None)


def _rendered(
    ask: ChatAsk, served: Served, toolbox: Toolbox, messages: Sequence[Message], tools: Sequence[JSON] | None
) -> str:
    go_on = bool(ask.continue_final_message)
    forced = toolbox.grammar or (ask.response_format and ask.response_format.grammar)
    options = ({"enable_thinking": False} if forced else {}) | ask.template_options
    return served.text.render(
        messages,
        tools=tools,
        add_generation_prompt=not go_on if ask.add_generation_prompt is None else ask.add_generation_prompt,
        continue_final_message=go_on,
        options=options,
    )


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


class ChatTeller(Chunks):
    """`chat.completion` and its chunks: the role once, first; deltas; an empty delta with the finish."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, head: Head, counting: Counting, readers: Sequence[Reader], *, scored: bool) -> None:
        super().__init__(head, counting)
        self._readers = readers
        self._scored = scored
        self._called = [False] * len(readers)
        self._waiting: list[tuple[Told, ...]] = [()] * len(readers)  # tokens of text that a reader holds back

    def first_choices(self, count: int) -> list[JSON]:
        return [self._choice(index, {"role": "assistant", "content": ""}) for index in range(count)]

    def choices(self, event: Event) -> list[JSON]:
        at = event.at
        self._waiting[at] += event.tokens
        deltas = self._read(event)
        told = [self._choice(at, _delta(delta), self._scores(at)) for delta in deltas]
        if event.finish:
            told.append(self._choice(at, {}, self._scores(at), self._finish(event)))
        return told

    def whole_choice(self, event: Event) -> JSON:
        deltas = merge(self._read(event))
        scores = logprobs.chat(event.tokens, self.text) if self._scored else None
        return {
            "index": event.at,
            "message": _message(deltas),
            "logprobs": scores,
            "finish_reason": self._finish(event),
        }

    def _read(self, event: Event) -> list[Delta]:
        reader = self._readers[event.at]
        deltas = reader.feed(event.text)
        if event.finish:
            deltas = [*deltas, *reader.end()]
        if not self._called[event.at]:
            self._called[event.at] = any(isinstance(delta, CallBegin) for delta in deltas)
        return deltas

    def _finish(self, event: Event) -> str | None:
        """The model stopped to have its calls answered; one that was cut off is not to be answered."""
        return "tool_calls" if event.finish == "stop" and self._called[event.at] else event.finish

    def _scores(self, at: int) -> JSON | None:
        tokens, self._waiting[at] = self._waiting[at], ()
        return logprobs.chat(tokens, self.text) if tokens else None

    def _choice(self, index: int, delta: JSON, scores: JSON | None = None, finish: str | None = None) -> JSON:
        return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}


def _delta(delta: Delta) -> JSON:
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(deltas: Sequence[Delta]) -> JSON:
    """`content` is null where there are calls and no text beside them."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    calls = [delta for delta in deltas if isinstance(delta, CallBegin)]
    message: JSON = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_called(call, deltas) for call in calls]
    return message


def _called(call: CallBegin, deltas: Sequence[Delta]) -> JSON:
    arguments = "".join(d.text for d in deltas if isinstance(d, CallArguments) and d.index == call.index)
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
