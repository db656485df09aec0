"""What is refused, with which status, code and param; nothing of it ever reaches the backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pipeline.api import schemas
from tests.api.conftest import EOS, chat
from tests.api.fake import FakeBackend, steps

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
UNSUPPORTED = "unsupported_parameter"


@pytest.fixture(autouse=True)
def _nothing_submitted(backend: FakeBackend) -> Iterator[None]:
    yield
    assert backend.requests == []


async def refused(client: httpx.AsyncClient, path: str, body: Any, status: int = 400) -> tuple[Any, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert "x-should-retry" not in answer.headers
    return error["param"], error["code"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": True}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [1024]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"model": 5}, "model"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"1024": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"min_tokens": 40, "max_tokens": 30}, "min_tokens"),
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_wrong_values_of_common_fields(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    body = chat(**fields) if path == CHAT else {"prompt": "a", **fields}
    assert await refused(client, path, body) == (param, "invalid_value")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{}], "messages[0].role"),
        ([123], "messages[0]"),
        ("hello", "messages"),
        ([{"role": "user", "content": 123}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ],
)
async def test_wrong_messages(client: httpx.AsyncClient, messages: Any, param: str) -> None:
    assert await refused(client, CHAT, {"messages": messages}) == (param, "invalid_value")


async def test_messages_are_needed(client: httpx.AsyncClient) -> None:
    assert await refused(client, CHAT, {"model": "tiny"}) == ("messages", "invalid_value")
    assert await refused(client, TEXT, {"model": "tiny"}) == ("prompt", "invalid_value")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_content_that_is_no_text(client: httpx.AsyncClient, kind: str) -> None:
    content = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "data:,"}}]
    body = {"messages": [{"role": "user", "content": content}]}
    assert await refused(client, CHAT, body) == ("messages[0].content[1].type", "unsupported_content")


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{}]},
        {"function_call": "auto"},
        {"guided_json": {}},
        {"structured_outputs": {"regex": "a"}},
        {"suffix": "x"},
        {"use_beam_search": True},
        {"chat_template": "{{ x }}"},
        {"prompt_embeds": "x"},
        {"adapters": "/tmp/x"},
        {"modalities": ["audio"]},
        {"kv_transfer_params": {}},
        {"bootstrap_room": 7},
        {"handoff_id": "x"},
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_cannot_be_done_is_refused_by_name(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    body = chat(**fields) if path == CHAT else {"prompt": "a", **fields}
    assert await refused(client, path, body) == (next(iter(fields)), UNSUPPORTED)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"echo": True}),
        (CHAT, {"best_of": 2}),
        (CHAT, {"prompt": "a"}),
        (TEXT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (TEXT, {"tool_choice": "auto"}),
        (TEXT, {"top_logprobs": 5}),
        (TEXT, {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_what_the_other_endpoint_has(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    body = chat(**fields) if path == CHAT else {"prompt": "a", **fields}
    assert await refused(client, path, body) == (next(iter(fields)), UNSUPPORTED)


async def test_every_name_of_the_table_is_refused(client: httpx.AsyncClient) -> None:
    for path, body, own in ((CHAT, chat(), schemas._CHAT_INERT), (TEXT, {"prompt": "a"}, schemas._TEXT_INERT)):
        for name in {**schemas._INERT, **own}.keys() - body.keys():
            asked = {**body, name: {"odd": 1}}
            assert await refused(client, path, asked) == (name, UNSUPPORTED)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
async def test_wrong_values_of_a_chat(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    assert await refused(client, CHAT, chat(**fields)) == (param, "invalid_value")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_wrong_values_of_a_completion(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    assert await refused(client, TEXT, {"prompt": "a", **fields}) == (param, "invalid_value")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_schema_that_cannot_be_enforced(client: httpx.AsyncClient, path: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    body = chat(response_format=form) if path == CHAT else {"prompt": "a", "response_format": form}
    assert await refused(client, path, body) == ("response_format", "invalid_grammar")
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    assert await refused(client, CHAT, chat(tools=[broken], tool_choice="required")) == ("tools", "invalid_grammar")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["a"] * 17, "prompt"),
        ([True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([1024], "prompt"),
        ([[5], [1024]], "prompt"),
        (5, "prompt"),
    ],
)
async def test_wrong_prompts(client: httpx.AsyncClient, prompt: Any, param: str) -> None:
    assert await refused(client, TEXT, {"prompt": prompt}) == (param, "invalid_value")


async def test_a_chat_of_too_many_messages(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "x"}] * 33
    assert await refused(client, CHAT, {"messages": messages}) == ("messages", "invalid_value")


async def test_a_chat_without_tokens(client: httpx.AsyncClient) -> None:
    body = chat(max_completion_tokens=0, max_tokens=5)
    assert await refused(client, CHAT, body) == ("max_completion_tokens", "invalid_value")


async def test_two_ways_to_go_on(client: httpx.AsyncClient) -> None:
    body = chat(continue_final_message=True, add_generation_prompt=True)
    assert await refused(client, CHAT, body) == ("continue_final_message", "invalid_value")


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    for path, body in ((CHAT, chat()), (TEXT, {"prompt": "a"})):
        answer = await client.post(path, json={**body, "model": "nobody/here"})
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "The model `nobody/here` does not exist.",
            "type": "invalid_request_error",
            "param": None,
            "code": "model_not_found",
        }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_window(client: httpx.AsyncClient, stream: bool) -> None:
    answer = await client.post(TEXT, json={"prompt": [5] * 512, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "this model's maximum context length is 512 tokens" in error["message"].lower()
    assert "your request has 512 prompt tokens, which exceeds the context window" in error["message"]
    param, code = await refused(client, CHAT, chat("word " * 600))
    assert (param, code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("route", ["mlx", "a->b->c", "local:"])
async def test_a_route_that_is_none(client: httpx.AsyncClient, route: str) -> None:
    answer = await client.post(CHAT, json=chat(), headers={"X-Crossfill-Route": route})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Crossfill-Route")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"a": ' + b"[" * 40_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        "{}".encode("utf-16"),
    ],
)
async def test_bodies_that_are_no_json_object(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_number_that_overflows(client: httpx.AsyncClient) -> None:
    body = json.dumps(chat()).replace('"tiny"', '"tiny", "temperature": 1e999').encode()
    answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("content_type", [None, "text/plain", "multipart/form-data"])
async def test_content_types_that_are_no_json(client: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    answer = await client.post(CHAT, content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


async def test_bodies_too_large_declared_or_not(client: httpx.AsyncClient) -> None:
    async def trickle() -> Any:
        for _ in range(11):
            yield b" " * 10_000

    for content in (b" " * 100_001, trickle()):
        answer = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_values_that_ask_for_nothing_are_no_reason_to_refuse(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.scripts = [steps([EOS], "stop")]
    inert = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "min_p": 0.0,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "reasoning_effort": "low",
        "request_id": "mine",
        "no_such_field": [1, 2],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = await client.post(CHAT, json=chat(**inert))
    assert answer.status_code == 200
    assert backend.requests[0].handoff_id != "mine"
    backend.requests.clear()
