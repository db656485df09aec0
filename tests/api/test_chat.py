"""Chat completions: the objects of the schema, their order in a stream, and what reaches the engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pipeline.api.text import Text
from pipeline.errors import BrokerError, CrossfillError, InvalidParameterError, NoReplicaError, OverloadedError
from pipeline.request import Sampling
from pipeline.routing import Wish
from tests.api.conftest import CREATED, EOS, chat
from tests.api.fake import FakeBackend, FakeSubmission, failure, steps

pytestmark = pytest.mark.anyio
Ids = Callable[[str], list[int]]


def frames(body: str) -> list[Any]:
    """The stream's frames: objects, comments as their text, the end as `[DONE]`."""
    parts = body.split("\n\n")
    assert parts.pop() == ""
    return [_frame(part) for part in parts]


def _frame(part: str) -> Any:
    assert "\n" not in part
    if part.startswith(":") or part == "data: [DONE]":
        return part.removeprefix("data: ")
    assert part.startswith("data: ")
    return json.loads(part[6:])


async def stream(client: httpx.AsyncClient, path: str = "/v1/chat/completions", **asked: Any) -> list[Any]:
    answer = await client.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    return frames(answer.text)


def delta(frame: Any) -> tuple[Any, Any]:
    [choice] = frame["choices"]
    assert (choice["index"], choice["logprobs"]) == (0, None)
    return choice["delta"], choice["finish_reason"]


async def test_one_answer(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps([*ids("Hello there"), EOS], "stop", size=3, held=5)]
    answer = await client.post("/v1/chat/completions", json=chat("Hi"))
    assert answer.status_code == 200
    found = answer.json()
    [request] = backend.requests
    assert found.pop("created") > CREATED
    assert found == {
        "id": f"chatcmpl-{request.handoff_id}",
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": found["system_fingerprint"],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(request.token_ids),
            "completion_tokens": len(ids("Hello there")) + 1,
            "total_tokens": len(request.token_ids) + len(ids("Hello there")) + 1,
            "prompt_tokens_details": {"cached_tokens": 5},
        },
    }
    assert backend.log == [("close",)]


async def test_the_prompt_is_the_rendered_chat(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps([EOS], "stop")]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "input_text", "text": "brief"}]},
        {"role": "user", "content": "Hi", "name": None},
    ]
    answer = await client.post("/chat/completions", json={"messages": messages})
    assert answer.status_code == 200
    [request] = backend.requests
    rendered = "<|im_start|>system\nBe\nbrief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert list(request.token_ids) == ids(rendered)
    assert answer.json()["choices"][0]["message"]["content"] == ""


async def test_defaults_are_explicit(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.scripts = [steps([EOS], "stop")]
    for field in ("temperature", "top_p", "seed", "stop", "max_tokens", "stream", "stream_options", "n", "tools"):
        assert (await client.post("/v1/chat/completions", json=chat(**{field: None}))).status_code == 200
    assert {request.sampling for request in backend.requests} == {
        Sampling(max_tokens=32, temperature=1.0, top_p=1.0, top_k=0, seed=None, stop_token_ids=(EOS,))
    }
    assert backend.wishes == [Wish()] * 9


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 3, "max_completion_tokens": 4}, {"max_tokens": 4}),
        ({"max_tokens": 3, "max_completion_tokens": None}, {"max_tokens": 3}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "top_k": 40, "seed": -3}, {"top_p": 0.5, "top_k": 40, "seed": -3}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 1024}, {"top_k": 0}),
        ({"stop_token_ids": [7, 2, 7]}, {"stop_token_ids": (2, 7)}),
        ({"ignore_eos": True, "stop_token_ids": [7]}, {"stop_token_ids": (7,)}),
    ],
)
async def test_sampling_fields(
    client: httpx.AsyncClient, backend: FakeBackend, asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    backend.scripts = [steps([EOS], "stop")]
    assert (await client.post("/v1/chat/completions", json=chat(**asked))).status_code == 200
    plain = {"max_tokens": 32, "stop_token_ids": (EOS,)}
    assert backend.requests[0].sampling == Sampling(**{**plain, **expected})


async def test_max_tokens_is_cut_to_the_context_window(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.scripts = [steps([EOS], "stop")]
    await client.post("/v1/chat/completions", json=chat(max_tokens=10_000))
    [request] = backend.requests
    assert request.sampling.max_tokens == 512 - len(request.token_ids)


async def test_salt_keeps_keys_and_tenants_apart(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.scripts = [steps([EOS], "stop")]
    asked = [
        ({}, {}),
        ({}, {"cache_salt": "a"}),
        ({"Authorization": "Bearer k"}, {}),
        ({"Authorization": "bearer  k"}, {}),
    ]
    for headers, fields in asked:
        await client.post("/v1/chat/completions", json=chat(**fields), headers=headers)
    salts = [request.salt for request in backend.requests]
    assert len(set(salts)) == 3
    assert salts[2] == salts[3]
    assert len(salts[0]) == 64
    assert len({request.handoff_id for request in backend.requests}) == 4


async def test_order_of_a_stream(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    token_ids = ids("a \N{GRINNING FACE}!")
    backend.scripts = [steps([*token_ids, EOS], "stop")]
    found = await stream(client, **chat(stream=True))
    assert found.pop() == "[DONE]"
    assert {(f["id"], f["object"], f["model"]) for f in found} == {
        (f"chatcmpl-{backend.requests[0].handoff_id}", "chat.completion.chunk", "tiny")
    }
    assert all("usage" not in frame for frame in found)
    first, *middle, last = map(delta, found)
    assert first == ({"role": "assistant", "content": ""}, None)
    assert last == ({}, "stop")
    assert [(d, finish) for d, finish in middle] == [
        ({"content": piece}, None) for piece in ("a", " ", "\N{GRINNING FACE}", "!")
    ]
    assert len(token_ids) >= 6  # the emoji came in several tokens


async def test_usage_of_a_stream(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps([*ids("ab"), EOS], "stop", held=3)]
    found = await stream(client, **chat(stream=True, stream_options={"include_usage": True}))
    assert found.pop() == "[DONE]"
    last = found.pop()
    assert last["choices"] == []
    prompt, completion = len(backend.requests[0].token_ids), len(ids("ab")) + 1
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert all(frame["usage"] is None for frame in found)
    running = {"include_usage": True, "continuous_usage_stats": True}
    found = await stream(client, **chat(stream=True, stream_options=running))
    assert found[-2]["usage"]["completion_tokens"] == completion
    assert all(frame["usage"]["prompt_tokens"] == prompt for frame in found[:-1])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 50])
async def test_a_stop_string_ends_it(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, text: Text, streamed: bool, size: int
) -> None:
    token_ids = ids("One two three four five")
    backend.scripts = [steps(token_ids, None, size=size)]
    asked = chat(stop=["zzz", "wo th"], stream=streamed)
    if streamed:
        found = await stream(client, **asked, stream_options={"include_usage": True})
        said = "".join(delta(frame)[0].get("content", "") for frame in found[:-2])
        finish, usage = delta(found[-3])[1], found[-2]["usage"]
    else:
        answer = (await client.post("/v1/chat/completions", json=asked)).json()
        [choice], usage = answer["choices"], answer["usage"]
        said, finish = choice["message"]["content"], choice["finish_reason"]
    assert (said, finish) == ("One t", "stop")
    until = next(n for n in range(len(token_ids)) if "wo th" in text.decode(token_ids[:n]))
    assert usage["completion_tokens"] == until
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7  # D said no last word: the trace knows
    assert backend.log == [("stop",), ("close",)]


async def test_a_broker_that_stays_away_is_a_failure(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [[*steps(ids("ab"), None), BrokerError("away")]]
    answer = await client.post("/v1/chat/completions", json=chat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "broker_unavailable")
    assert [entry[0] for entry in backend.log] == ["cancel", "close"]


async def test_a_stop_string_that_the_ledger_refuses_cancels(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another D is about to take over: it must not compute for nobody."""

    async def refused(self: FakeSubmission) -> bool:
        return False

    monkeypatch.setattr(FakeSubmission, "stop", refused)
    backend.scripts = [steps(ids("One two three"), None, size=1)]
    answer = await client.post("/v1/chat/completions", json=chat(stop=["wo th"]))
    assert answer.json()["choices"][0]["message"]["content"] == "One t"
    assert [entry[0] for entry in backend.log] == ["cancel", "close"]


async def test_what_was_held_back_for_a_stop_is_flushed(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids
) -> None:
    backend.scripts = [steps(ids("One two"))]
    found = await stream(client, **chat(stream=True, stop="two three"))
    assert "".join(delta(frame)[0].get("content", "") for frame in found[:-1]) == "One two"
    assert delta(found[-2])[1] == "length"
    assert all(frame["choices"][0]["delta"].get("content") != "" for frame in found[1:-1])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "One t"),
        ({"include_stop_str_in_output": True}, "One two th"),
    ],
)
async def test_the_stop_itself(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, fields: dict[str, Any], said: str
) -> None:
    backend.scripts = [steps(ids("One two three"))]
    answer = await client.post("/v1/chat/completions", json=chat(stop="wo th", **fields))
    assert answer.json()["choices"][0]["message"]["content"] == said


@pytest.mark.parametrize(("include", "said"), [(False, "One"), (True, "One!")])
async def test_a_stop_token_is_counted_and_shown_only_on_wish(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, include: bool, said: str
) -> None:
    one, two = ids("One"), ids("!")[0]
    assert ids("!") == [two]
    backend.scripts = [steps([*one, two], "stop", size=2)]
    asked = chat(stop_token_ids=[two], include_stop_str_in_output=include)
    answer = (await client.post("/v1/chat/completions", json=asked)).json()
    assert answer["choices"][0]["message"]["content"] == said
    assert answer["usage"]["completion_tokens"] == len(one) + 1


async def test_trace_and_route_on_wish(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.scripts = [steps([EOS], "stop")]
    headers = {"X-Crossfill-Trace": "1", "X-Crossfill-Route": "vllm->mlx"}
    trace = {"route": {"prefill_engine": "vllm"}, "reused_tokens": 7}
    answer = await client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert answer.json()["crossfill"] == trace
    assert backend.wishes == [Wish("vllm", "mlx")]
    wishes: list[dict[str, Any]] = [{}, {"stream_options": {"include_usage": True}}]
    for options in wishes:
        answer = await client.post("/v1/chat/completions", json=chat(stream=True, **options), headers=headers)
        *before, last, _ = frames(answer.text)
        assert last["crossfill"] == trace
        assert all("crossfill" not in frame for frame in before)


async def test_continue_the_final_message(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [steps([EOS], "stop")]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    answer = await client.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    assert answer.status_code == 200
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "
    assert list(backend.requests[0].token_ids) == ids(rendered)


async def test_silence_is_filled_with_comments(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    silence = asyncio.Event()
    backend.scripts = [[*steps(ids("a"), None), silence, *steps([EOS], "stop")]]
    asyncio.get_running_loop().call_later(0.3, silence.set)
    found = await stream(client, **chat(stream=True))
    comments = [frame for frame in found if frame == ": keep-alive"]
    assert len(comments) >= 1
    rest = [frame for frame in found if frame != ": keep-alive"]
    assert [delta(frame) for frame in rest[:-1]] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "a"}, None),
        ({}, "stop"),
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_failure_before_the_first_token_has_a_status(
    client: httpx.AsyncClient, backend: FakeBackend, streamed: bool
) -> None:
    backend.scripts = [[failure("worker_lost", "decode worker box at 10.0.0.7:6379 is gone")]]
    answer = await client.post("/v1/chat/completions", json=chat(stream=streamed))
    assert answer.status_code == 502
    assert answer.headers["x-should-retry"] == "true"
    assert answer.json() == {
        "error": {
            "message": "decode worker box at <address> is gone",
            "type": "server_error",
            "param": None,
            "code": "worker_lost",
        }
    }
    assert backend.log == [("close",)]


async def test_a_failure_later_is_a_frame_and_never_a_finish(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids
) -> None:
    backend.scripts = [[*steps(ids("ab"), None), failure("engine_failed", "boom", retryable=False)]]
    found = await stream(client, **chat(stream=True, stream_options={"include_usage": True}))
    assert found[-2:] == [
        {"error": {"message": "boom", "type": "server_error", "param": None, "code": "engine_failed"}},
        "[DONE]",
    ]
    assert [delta(frame)[1] for frame in found[:-2]] == [None] * (1 + len(ids("ab")))


async def test_a_bug_says_nothing_of_itself(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [[ValueError("/secret/path")]]
    answer = await client.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"] == {
        "message": "Internal server error.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    backend.scripts = [[*steps(ids("a"), None), ValueError("/secret/path")]]
    found = await stream(client, **chat(stream=True))
    assert found[-2]["error"]["message"] == "Internal server error."


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (NoReplicaError("no decode replica is alive for this model"), 503, "no_replica", "1"),
        (OverloadedError("too many prompts wait"), 429, "overloaded", "1"),
        (InvalidParameterError("X-Crossfill-Route", "Unknown engine `tpu`."), 400, "invalid_value", None),
    ],
)
async def test_what_the_backend_refuses(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    streamed: bool,
    refusal: CrossfillError,
    status: int,
    code: str,
    retry_after: str | None,
) -> None:
    backend.refusal = refusal
    answer = await client.post("/v1/chat/completions", json=chat(stream=streamed))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers.get("Retry-After") == retry_after
