"""Tools: what the prompt says of them, the grammar of a call that must come, and answers that call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from pipeline import grammar
from pipeline.api import tool
from pipeline.api.call import BareCalls, GivenCall, TaggedCalls
from pipeline.api.delta import PlainReader
from pipeline.api.schemas import ChatAsk, read
from pipeline.api.text import Text
from pipeline.api.tool import Toolbox
from tests.api.conftest import EOS, chat
from tests.api.fake import FakeBackend, steps
from tests.api.test_chat import frames

pytestmark = pytest.mark.anyio
Ids = Callable[[str], list[int]]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
FORCED = {"type": "function", "function": {"name": "get_weather"}}


def box(**fields: Any) -> Toolbox:
    return Toolbox.of(read(ChatAsk, chat(**fields)))


def schema(toolbox: Toolbox) -> Any:
    assert toolbox.grammar is not None
    grammar.check(toolbox.grammar, "tools")
    return json.loads(toolbox.grammar)["json_schema"]


def test_what_may_be_called() -> None:
    assert box().tools == box(tools=[WEATHER], tool_choice="none").tools == ()
    assert box(tools=[WEATHER, CLOCK]).names == {"get_weather", "clock"}
    assert box(tools=[WEATHER, CLOCK]).grammar is None
    assert box(tools=[WEATHER, CLOCK]).shown == [WEATHER, CLOCK]


def test_the_grammar_of_one_tool_is_that_of_its_arguments() -> None:
    assert schema(box(tools=[CLOCK, WEATHER], tool_choice=FORCED)) == WEATHER["function"]["parameters"]  # type: ignore[index]
    named = {"type": "function", "function": {"name": "clock"}}
    assert schema(box(tools=[CLOCK], tool_choice=named)) == {"type": "object"}


def test_the_grammar_of_any_tool_is_a_list_of_calls() -> None:
    found = schema(box(tools=[WEATHER, CLOCK], tool_choice="required"))
    assert (found["type"], found["minItems"], "maxItems" in found) == ("array", 1, False)
    first, second = found["items"]["anyOf"]
    assert first["properties"] == {
        "name": {"const": "get_weather"},
        "arguments": WEATHER["function"]["parameters"],  # type: ignore[index]
    }
    assert second["properties"]["arguments"] == {"type": "object"}
    assert schema(box(tools=[CLOCK], tool_choice="required", parallel_tool_calls=False))["maxItems"] == 1


def test_references_follow_a_schema_to_its_place() -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}, "next": {"$ref": "#"}},
        "$defs": {"Place": {"enum": ["here", "there"]}},
    }
    asked = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    found = schema(box(tools=[WEATHER, asked], tool_choice="required"))
    arguments = found["items"]["anyOf"][1]["properties"]["arguments"]
    place = "#/items/anyOf/1/properties/arguments"
    assert arguments["properties"] == {"at": {"$ref": f"{place}/$defs/Place"}, "next": {"$ref": place}}


@pytest.fixture
def tokenizer(text: Text, checkpoint: Any) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def test_who_reads_the_text(text: Text, tokenizer: Tokenizer) -> None:
    qwen = Text(tokenizer, "{% for t in tools %}{% endfor %}<tool_call>")
    llama = Text(tokenizer, "{% for t in tools %}{% endfor %}")
    auto = box(tools=[WEATHER])
    for each, kind in ((text, TaggedCalls), (qwen, TaggedCalls), (llama, BareCalls)):
        assert isinstance(auto.reader(each), kind)
    assert isinstance(box().reader(qwen), PlainReader)
    assert isinstance(box(tools=[WEATHER], tool_choice="required").reader(qwen), BareCalls)
    assert isinstance(box(tools=[WEATHER], tool_choice=FORCED).reader(qwen), GivenCall)


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "clock", "arguments": {"z": "é"}}}],
    },
    {"role": "tool", "content": "12:00", "tool_call_id": "c"},
]


def test_a_template_that_knows_tools_is_left_alone(tokenizer: Tokenizer) -> None:
    knows = Text(tokenizer, "{{ tools }}")
    assert tool.told(HISTORY, box(tools=[WEATHER]), knows) == HISTORY


def test_one_that_does_not_gets_a_system_message_and_text(text: Text) -> None:
    system, user, call, result = tool.told(HISTORY, box(tools=[WEATHER, CLOCK]), text)
    assert system["role"] == "system"
    assert [json.loads(line) for line in system["content"].split("line:\n")[1].splitlines()] == [
        WEATHER["function"],
        CLOCK["function"],
    ]
    assert user == HISTORY[0]
    assert call == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "clock", "arguments": {"z": "é"}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "<tool_response>\n12:00\n</tool_response>"}
    given = [{"role": "system", "content": "Be brief."}, *HISTORY]
    first, *_ = tool.told(given, box(tools=[WEATHER]), text)
    assert first["content"].startswith("Be brief.\n\nYou can call functions.")
    assert len(tool.told(HISTORY, box(), text)) == 3  # no tools: no system message, the history as text all the same


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


async def asked(client: httpx.AsyncClient, streamed: bool, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message and the finish reason, put together from the deltas of a stream."""
    answer = await client.post("/v1/chat/completions", json=chat(stream=streamed, **fields))
    assert answer.status_code == 200, answer.text
    if not streamed:
        [choice] = answer.json()["choices"]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    finish = ""
    for frame in frames(answer.text)[:-1]:
        [choice] = frame["choices"]
        finish = choice["finish_reason"] or finish
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", ()):
            _add(message, part)
    return message, finish


def _add(message: dict[str, Any], part: dict[str, Any]) -> None:
    calls = message.setdefault("tool_calls", [])
    if "id" in part:
        assert part["index"] == len(calls)
        calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
    else:
        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_model_calls(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, streamed: bool) -> None:
    backend.scripts = [steps([*ids(f"One moment.\n{CALL}\n{CALL}"), EOS], "stop")]
    message, finish = await asked(client, streamed, tools=[WEATHER, CLOCK])
    first, second = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "One moment.", "refusal": None}
    assert first["function"] == second["function"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    assert first["id"] != second["id"]
    assert finish == "tool_calls"
    assert backend.requests[0].sampling.grammar is None


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "written"),
    [("required", '[{"name": "get_weather", "arguments": {"city": "Köln"}}]'), (FORCED, '{"city": "Köln"}')],
)
async def test_a_call_that_must_come(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, streamed: bool, choice: Any, written: str
) -> None:
    backend.scripts = [steps([*ids(written), EOS], "stop")]
    message, finish = await asked(client, streamed, tools=[WEATHER], tool_choice=choice)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    assert (message["content"], finish) == (None, "tool_calls")
    assert backend.requests[0].sampling.grammar == box(tools=[WEATHER], tool_choice=choice).grammar


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_was_cut_off_is_not_to_be_answered(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, streamed: bool
) -> None:
    backend.scripts = [steps(ids('<tool_call>{"name": "get_weather", "arguments": {"ci'), "length")]
    message, finish = await asked(client, streamed, tools=[WEATHER])
    assert (message["tool_calls"][0]["function"]["arguments"], finish) == ('{"ci', "length")


@pytest.mark.parametrize("streamed", [False, True])
async def test_tags_are_text_when_no_tools_were_given(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, streamed: bool
) -> None:
    backend.scripts = [steps([*ids(CALL), EOS], "stop")]
    wishes: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}]
    for fields in wishes:
        message, finish = await asked(client, streamed, **fields)
        assert (message["content"], finish) == (CALL, "stop")


async def test_the_prompt_tells_of_the_tools(client: httpx.AsyncClient, backend: FakeBackend, text: Text) -> None:
    backend.scripts = [steps([EOS], "stop")]
    await client.post("/v1/chat/completions", json=chat(tools=[CLOCK]))
    rendered = text.decode(backend.requests[0].token_ids, skip_special_tokens=False)
    assert '{"name": "clock"}<|im_end|>\n<|im_start|>user\nHi<|im_end|>' in rendered
    await client.post("/v1/chat/completions", json=chat(tools=[CLOCK], tool_choice="none"))
    assert "clock" not in text.decode(backend.requests[1].token_ids)
    told = await client.post("/tokenize", json=chat(tools=[CLOCK]))
    assert tuple(told.json()["tokens"]) == backend.requests[0].token_ids
