"""What engines are asked for beyond plain text: several samples, log-probabilities, penalties, a form, thoughts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs
from tokenizers import Tokenizer

from pipeline.api.app import create_app
from pipeline.api.served import Catalogue, Served
from pipeline.api.text import Text
from pipeline.broker.channel import TokenEntry
from pipeline.errors import UnsupportedFeatureError
from pipeline.logprob import TokenLogprob
from pipeline.request import Sampling
from tests.api.conftest import EOS, chat, settings
from tests.api.fake import FakeBackend, Step, steps
from tests.api.test_chat import frames
from tests.api.test_tool import asked

pytestmark = pytest.mark.anyio
Ids = Callable[[str], list[int]]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"presence_penalty": 1, "frequency_penalty": -0.5}, {"presence_penalty": 1.0, "frequency_penalty": -0.5}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"logit_bias": {"7": -100, "3": 2.5, "9": 0}}, {"logit_bias": ((3, 2.5), (7, -100.0))}),
        ({"min_tokens": 5}, {"min_tokens": 5}),
        ({"n": 3, "seed": 7}, {"n": 3, "seed": 7}),
        ({"response_format": {"type": "json_object"}}, {"grammar": '{"json_object":true}'}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {}}}},
            {"grammar": '{"json_schema":{}}'},
        ),
        ({"response_format": {"type": "text"}}, {}),
        ({"n": 1, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "min_tokens": 0}, {}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_the_engines_are_told(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    backend.scripts = [[TokenEntry(i, (EOS,), "stop", sample=i, more=i < fields.get("n", 1) - 1) for i in range(3)]]
    body = chat(**fields) if path == CHAT else {"prompt": "a", "max_tokens": 32, **fields}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert backend.requests[0].sampling == Sampling(**{"max_tokens": 32, "stop_token_ids": (EOS,), **expected})


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, 3),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, None),
        (TEXT, {"logprobs": 0}, 0),
        (TEXT, {"logprobs": 5}, 5),
        (TEXT, {"logprobs": False}, None),
        (TEXT, {"logprobs": None}, None),
    ],
)
async def test_alternatives(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, fields: dict[str, Any], expected: int | None
) -> None:
    backend.scripts = [[TokenEntry(0, (EOS,), "stop", logprobs=(TokenLogprob(EOS, -1.0),))]]
    body = chat(**fields) if path == CHAT else {"prompt": "a", **fields}
    assert (await client.post(path, json=body)).status_code == 200
    assert backend.requests[0].sampling.logprobs == expected


def scored(token_ids: list[int], finish: str, other: int) -> list[Step]:
    scores = [TokenLogprob(token_id, -0.5, ((token_id, -0.5), (other, -1.5))) for token_id in token_ids]
    return [TokenEntry(0, tuple(token_ids), finish, held_tokens=0, logprobs=tuple(scores))]


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_of_a_chat(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, streamed: bool) -> None:
    face = ids("\N{GRINNING FACE}")
    [a], [b] = ids("a"), ids("b")
    backend.scripts = [scored([a, *face, EOS], "stop", b)]
    answer = await client.post(CHAT, json=chat(stream=streamed, logprobs=True, top_logprobs=2))
    if streamed:
        choices = [frame["choices"][0] for frame in frames(answer.text)[:-1]]
        content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        content = answer.json()["choices"][0]["logprobs"]["content"]
    alternative = {"token": "b", "logprob": -1.5, "bytes": [98]}
    first = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert content[0] == {**first, "top_logprobs": [first, alternative]}
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a\N{GRINNING FACE}"
    assert len(content) == 1 + len(face)


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_of_a_completion(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, streamed: bool
) -> None:
    [a], [b] = ids("a"), ids("b")
    backend.scripts = [scored([a, b], "length", b)]
    answer = await client.post(TEXT, json={"prompt": "x", "stream": streamed, "logprobs": 2})
    found = [frame["choices"][0] for frame in frames(answer.text)[:-1]] if streamed else answer.json()["choices"]
    assert found[0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5}],
        "text_offset": [0, 1],
    }


def samples(ids: Ids, *texts: str) -> list[Step]:
    """Each sample token by token, one after the other's token; each ends with EOS."""
    left = [[*ids(text), EOS] for text in texts]
    entries: list[Step] = []
    while any(left):
        for sample, tokens in enumerate(left):
            if tokens:
                token_id = tokens.pop(0)
                finish = None if tokens else "stop"
                entries.append(TokenEntry(len(entries), (token_id,), finish, sample=sample, more=any(left)))
    last = entries[-1]
    assert isinstance(last, TokenEntry)
    entries[-1] = structs.replace(last, held_tokens=4)
    return entries


def by_index(answer: httpx.Response, streamed: bool, kind: str) -> list[tuple[str, str]]:
    """Text and finish of every choice."""
    choices = [c for f in frames(answer.text)[:-1] for c in f["choices"]] if streamed else answer.json()["choices"]
    found = []
    for index in range(max(choice["index"] for choice in choices) + 1):
        mine = [choice for choice in choices if choice["index"] == index]
        if kind == TEXT:
            texts = [choice["text"] for choice in mine]
        else:
            texts = [choice.get("message", choice.get("delta")).get("content") or "" for choice in mine]
        [finish] = [choice["finish_reason"] for choice in mine if choice["finish_reason"]]
        found.append(("".join(texts), finish))
    return found


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_several_samples(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, streamed: bool, path: str
) -> None:
    backend.scripts = [samples(ids, "one", "", "three \N{GRINNING FACE}")]
    body = chat(n=3, stream=streamed) if path == CHAT else {"prompt": "a", "n": 3, "best_of": 3, "stream": streamed}
    answer = await client.post(path, json=body)
    assert by_index(answer, streamed, path) == [("one", "stop"), ("", "stop"), ("three \N{GRINNING FACE}", "stop")]
    assert len(backend.requests) == 1  # one handoff for all
    if not streamed:
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == len(backend.requests[0].token_ids)
        assert usage["completion_tokens"] == len(ids("one")) + len(ids("three \N{GRINNING FACE}")) + 3
        assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert backend.log == [("close",)]


async def test_a_last_word_before_every_sample_has_ended_is_an_error(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids
) -> None:
    """A worker of another make: nothing would ever come for the second sample."""
    backend.scripts = [steps(ids("one"), "stop")]
    answer = await client.post(TEXT, json={"prompt": "a", "n": 2})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "broker_unavailable")
    assert "closed before the answer had ended" in answer.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_strings_of_several_samples(
    client: httpx.AsyncClient, backend: FakeBackend, ids: Ids, streamed: bool
) -> None:
    """The first one ends early, D is told when both have ended."""
    backend.scripts = [samples(ids, "ab! and so on, for long", "and then something! more of it")]
    answer = await client.post(TEXT, json={"prompt": "a", "n": 2, "stop": "!", "stream": streamed})
    assert by_index(answer, streamed, TEXT) == [("ab", "stop"), ("and then something", "stop")]
    assert backend.log == [("stop",), ("close",)]


async def test_samples_of_several_prompts(client: httpx.AsyncClient, backend: FakeBackend, ids: Ids) -> None:
    backend.scripts = [samples(ids, "a", "b"), samples(ids, "c", "d")]
    answer = await client.post(TEXT, json={"prompt": ["x", "y"], "n": 2, "echo": True})
    assert by_index(answer, False, TEXT) == [("xa", "stop"), ("xb", "stop"), ("yc", "stop"), ("yd", "stop")]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


@pytest.mark.parametrize(
    ("fields", "feature", "param"),
    [
        ({"frequency_penalty": 1}, "penalties", "frequency_penalty"),
        ({"presence_penalty": 0, "repetition_penalty": 1.5}, "penalties", "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "grammar", "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "grammar", "tools"),
        ({"n": 2}, "n", "n"),
    ],
)
async def test_what_no_engine_can_do_is_named_as_it_was_asked(
    client: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any], feature: str, param: str
) -> None:
    backend.refusal = UnsupportedFeatureError(feature, ["sglang"])
    answer = await client.post(CHAT, json=chat(**fields))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
    assert f"`{param}`" in error["message"]
    assert "sglang" in error["message"]


GO_ON = {"continue_final_message": True}
THINKER = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% elif deep %}<think>{% endif %}"
)


@pytest.fixture
async def thinker(model: Served, backend: FakeBackend, checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    text = Text(Tokenizer.from_file(str(checkpoint / "tokenizer.json")), THINKER)
    app = create_app(settings(checkpoint), Catalogue([replace(model, text=text)]), backend)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as opened:
        yield opened


def said(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "written", "reasoning", "content"),
    [
        ({}, "<think>\nWhy? \n</think>\n\nSo.", "Why?", "So."),
        ({}, "So.", None, "So."),
        ({"chat_template_kwargs": {"deep": True}}, "Why?</think>So.", "Why?", "So."),
        ({"enable_thinking": False}, "So.", None, "So."),
        ({}, "<think>Why?", "Why?", ""),
        (said(("user", "What is <think>?")), "So.", None, "So."),
        (
            said(("user", "What is <think>?")) | {"chat_template_kwargs": {"deep": True}},
            "Why?</think>So.",
            "Why?",
            "So.",
        ),
        (said(("user", "Go."), ("assistant", "<think>Hm")) | GO_ON, "Why?</think>So.", "Why?", "So."),
    ],
)
async def test_thoughts_are_told_apart(
    thinker: httpx.AsyncClient,
    backend: FakeBackend,
    ids: Ids,
    streamed: bool,
    fields: dict[str, Any],
    written: str,
    reasoning: str | None,
    content: str,
) -> None:
    backend.scripts = [steps([*ids(written), EOS], "stop")]
    message, finish = await asked(thinker, streamed, **fields)
    assert (message.get("reasoning_content"), message["content"] or "", finish) == (reasoning, content, "stop")


async def test_a_text_in_a_given_form_has_no_thoughts(
    thinker: httpx.AsyncClient, backend: FakeBackend, ids: Ids, text: Text
) -> None:
    backend.scripts = [steps([*ids('{"a": "<think>"}'), EOS], "stop")]
    message, _ = await asked(thinker, False, response_format={"type": "json_object"})
    assert json.loads(message["content"]) == {"a": "<think>"}
    assert text.decode(backend.requests[0].token_ids).endswith("<think></think>")
