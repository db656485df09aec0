"""The Responses API: translated into a chat, answered in items; validated by the SDK's own types."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from pipeline.api.app import create_app
from pipeline.api.served import Catalogue, Served
from pipeline.api.text import Text
from pipeline.request import Sampling
from tests.api.conftest import EOS, settings
from tests.api.fake import FakeBackend, failure, steps

pytestmark = pytest.mark.anyio
Ids = Callable[[str], list[int]]
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
PATH = "/v1/responses"
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object"}}


async def create(client: httpx.AsyncClient, **asked: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"model": "tiny", **asked})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    Response.model_validate(found)
    return dict(found)


async def stream(client: httpx.AsyncClient, **asked: Any) -> list[dict[str, Any]]:
    answer = await client.post(PATH, json={"model": "tiny", "stream": True, **asked})
    assert answer.status_code == 200, answer.text
    events = []
    for frame in answer.text.split("\n\n")[:-1]:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


async def test_one_answer(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, text: Text) -> None:
    backend.scripts = [steps([*ids("Hello"), EOS], "stop", held=3)]
    found = await create(client, input="Hi", instructions="Be brief.", temperature=0.5, max_output_tokens=9, user="me")
    [item] = found["output"]
    assert item == {
        "id": item["id"],
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    [request] = backend.requests
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text.decode(request.token_ids, skip_special_tokens=False) == rendered
    assert request.sampling == Sampling(9, temperature=0.5, stop_token_ids=(EOS,))
    prompt, completion = len(request.token_ids), len(ids("Hello")) + 1
    assert found["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
    assert (found["status"], found["store"], found["error"]) == ("completed", False, None)
    assert found["id"].startswith("resp_")


async def test_a_stream_tells_what_the_whole_answer_tells(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids
) -> None:
    written = 'Wait.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "é\N{GRINNING FACE}"}}\n</tool_call>'
    backend.scripts = [steps([*ids(written), EOS], "stop")]
    whole = await create(client, input="Hi", tools=[CLOCK])
    events = await stream(client, input="Hi", tools=[CLOCK])
    assert [event["type"] for event in events if not event["type"].endswith(".delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    message, call = whole["output"]
    assert (message["content"][0]["text"], call["name"]) == ("Wait.", "clock")
    assert call["arguments"] == '{"zone": "é\N{GRINNING FACE}"}'
    last = events[-1]["response"]
    varying = ("id", "call_id")
    assert [_without(item, varying) for item in last["output"]] == [_without(item, varying) for item in whole["output"]]
    assert last["usage"] == whole["usage"]
    for kind, expected in (("output_text", "Wait."), ("function_call_arguments", call["arguments"])):
        pieces = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(pieces) == expected
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == last["output"]


@pytest.mark.parametrize(
    ("written", "thoughts"), [("<think>\nWhy not? \n</think>\n\nSo.", "Why not?"), ("So.", ""), ("<think>Why", "Why")]
)
async def test_tokens_of_thoughts_are_counted(
    model: Served, backend: FakeBackend, checkpoint: Path, ids: Ids, written: str, thoughts: str
) -> None:
    """The same number in a stream; the tags and the answer are not among them."""
    text = Text(Tokenizer.from_file(str(checkpoint / "tokenizer.json")), "{{ messages[0].content }}<think></think>")
    app = create_app(settings(checkpoint), Catalogue([replace(model, text=text)]), backend)
    backend.scripts = [steps([*ids(written), EOS], "stop")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
        whole = await create(client, input="Hi")
        last = (await stream(client, input="Hi"))[-1]["response"]
    assert whole["usage"]["output_tokens"] == len(ids(written)) + 1
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len(ids(thoughts)) if thoughts else 0}
    assert last["usage"] == whole["usage"]


def _without(item: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in names}


async def test_an_answer_that_was_cut_off(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps(ids("Hello"), "length")]
    found = await create(client, input="Hi")
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete"
    events = await stream(client, input="Hi")
    assert events[-1]["type"] == "response.incomplete"


async def test_a_conversation_with_calls(client: httpx.AsyncClient, backend: FakeBackend, text: Text) -> None:
    backend.scripts = [steps([EOS], "stop")]
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": "Time?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c", "name": "clock", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "12:00"},
    ]
    found = await create(client, input=conversation, tools=[CLOCK], tool_choice="none")
    assert found["output"] == []
    assert text.decode(backend.requests[0].token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nTime?<|im_end|>\n"
        '<|im_start|>assistant\nWait.\n<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_forms_and_forced_calls(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps([*ids("{}"), EOS], "stop")]
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}
    found = await create(client, input="Hi", text=form)
    assert found["text"]["format"]["schema"] == {"type": "object"}
    assert backend.requests[0].sampling.grammar == '{"json_schema":{"type":"object"}}'
    found = await create(client, input="Hi", tools=[CLOCK], tool_choice={"type": "function", "name": "clock"})
    assert (found["output"][0]["name"], found["output"][0]["arguments"]) == ("clock", "{}")
    assert backend.requests[1].sampling.grammar == '{"json_schema":{"type":"object"}}'


async def test_a_failure_after_the_first_token(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [[*steps(ids("ab"), None), failure("engine_failed", "boom")]]
    last = (await stream(client, input="Hi"))[-1]
    assert (last["type"], last["code"], last["message"]) == ("error", "engine_failed", "boom")
    assert last["error"]["code"] == "engine_failed"  # what SDKs raise


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": None}, "input", "invalid_value"),
        ({"input": ["x"]}, "input[0]", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_content"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": "Hi", "temperature": 3}, "temperature", "invalid_value"),
        ({"input": "Hi", "stream": "yes"}, "stream", "invalid_value"),
        ({"input": "Hi", "tools": 5}, "tools", "invalid_value"),
        ({"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"input": "Hi", "background": True}, "background", "unsupported_parameter"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"input": "Hi", "tools": "x"}, "tools", "invalid_value"),
        (
            {"input": "Hi", "text": {"format": {"type": "json_schema"}}},
            "text.format.json_schema.schema",
            "invalid_value",
        ),
        ({"input": "word " * 600}, "input", "context_length_exceeded"),
    ],
)
async def test_what_is_refused(
    client: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = await client.post(PATH, json=fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert backend.requests == []


async def test_nothing_is_stored(client: httpx.AsyncClient) -> None:
    for method, path in (("GET", f"{PATH}/resp_1"), ("DELETE", f"{PATH}/resp_1"), ("POST", f"{PATH}/resp_1/cancel")):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
