"""Text completions: prompts in every form, several at once, echo, and the objects of the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pipeline.api.text import Text
from tests.api.conftest import EOS
from tests.api.fake import FakeBackend, failure, steps
from tests.api.test_chat import frames

pytestmark = pytest.mark.anyio
Ids = Callable[[str], list[int]]


async def create(client: httpx.AsyncClient, **asked: Any) -> Any:
    answer = await client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_one_answer(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, text: Text) -> None:
    backend.scripts = [steps([*ids(" there"), EOS], "stop", held=1)]
    found = await create(client, model="tiny", prompt="Hello")
    [request] = backend.requests
    assert list(request.token_ids) == text.encode("Hello", add_special_tokens=True)
    assert request.sampling.max_tokens == 16
    assert found.pop("id").startswith("cmpl-")
    assert found.pop("created") > 0
    completion = len(ids(" there")) + 1
    assert found == {
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": found["system_fingerprint"],
        "choices": [{"index": 0, "text": " there", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": len(request.token_ids),
            "completion_tokens": completion,
            "total_tokens": len(request.token_ids) + completion,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_order_of_a_stream(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps(ids("ab"))]
    answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    *found, done = frames(answer.text)
    assert done == "[DONE]"
    assert {(frame["object"], frame["id"]) for frame in found} == {("text_completion", found[0]["id"])}
    choices = [choice for frame in found for choice in frame["choices"]]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert choices[-1] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    assert all(choice["text"] and choice["finish_reason"] is None for choice in choices[:-1])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [1023]], [(5, 6), (1023,)]),
    ],
)
async def test_token_ids_pass_untouched(
    client: httpx.AsyncClient, backend: FakeBackend, prompt: Any, expected: list[tuple[int, ...]]
) -> None:
    backend.scripts = [steps([EOS], "stop")]
    await create(client, prompt=prompt)
    assert [request.token_ids for request in backend.requests] == expected


@pytest.mark.parametrize("streamed", [False, True])
async def test_several_prompts(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, streamed: bool) -> None:
    backend.scripts = [steps(ids("one"), held=2), steps([*ids("two"), EOS], "stop", held=3)]
    asked = {"prompt": ["first", "second"], "stream": streamed}
    if streamed:
        asked["stream_options"] = {"include_usage": True}
        answer = await client.post("/v1/completions", json=asked)
        *chunks, last, _ = frames(answer.text)
        usage, choices = last["usage"], [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        found = await create(client, **asked)
        usage, choices = found["usage"], found["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]
    assert texts == ["one", "two"]
    assert [c["finish_reason"] for i in (0, 1) for c in choices if c["index"] == i and c["finish_reason"]] == [
        "length",
        "stop",
    ]
    assert usage["prompt_tokens"] == sum(len(request.token_ids) for request in backend.requests)
    assert usage["completion_tokens"] == len(ids("one")) + len(ids("two")) + 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5
    assert backend.log == [("close",), ("close",)]


async def test_one_failure_ends_all_and_cancels_the_others(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids
) -> None:
    import asyncio

    backend.scripts = [[*steps(ids("a"), None), asyncio.Event()], [failure()]]
    answer = await client.post("/v1/completions", json={"prompt": ["first", "second"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
    assert sorted(entry[0] for entry in backend.log) == ["cancel", "close", "close"]


async def test_echo(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps(ids(" b"))]
    found = await create(client, prompt="a", echo=True)
    assert found["choices"][0]["text"] == "a b"
    assert found["usage"]["completion_tokens"] == len(ids(" b"))
    found = await create(client, prompt=ids("a"), echo=True)
    assert found["choices"][0]["text"] == "a b"


async def test_echo_alone_asks_no_engine(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    found = await create(client, prompt="a b c", echo=True, max_tokens=0)
    assert found["choices"] == [{"index": 0, "text": "a b c", "logprobs": None, "finish_reason": "length"}]
    assert found["usage"]["completion_tokens"] == 0
    answer = await client.post("/v1/completions", json={"prompt": "a", "echo": True, "max_tokens": 0, "stream": True})
    assert [frame["choices"][0]["text"] for frame in frames(answer.text)[:-1]] == ["a", ""]
    assert backend.requests == []


async def test_max_tokens_null_is_the_default(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.scripts = [steps([EOS], "stop")]
    await create(client, prompt="a", max_tokens=None)
    assert backend.requests[0].sampling.max_tokens == 16
