"""Every row of the API's error table that is refused before a job exists, sent to a running system: what is told, and
that nothing of a refused request stays anywhere.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import httpx
import pytest

from tests.scenarios.system import System

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hi"}]
LEASES = (b"cf:owner:", b"cf:replica:", b"cf:sweep", b"cf:upkeep")  # of processes, not of requests
INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"


class Row(NamedTuple):
    """A request, and the status, code and param of its refusal. `body`: an object, or bytes as they are."""

    path: str
    body: Any
    status: int
    code: str
    param: str | None = None
    headers: dict[str, str] = {}
    method: str = "POST"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", **fields}


def part(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind}]}]


BODIES = [
    Row(CHAT, raw, 400, "invalid_json")
    for raw in (b"", b"{", b"[]", b'"x"', b'{"a": NaN}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"a":' + b"[" * 9000)
] + [
    Row(CHAT, b"{}", 415, "unsupported_media_type", headers={"content-type": "text/plain"}),
    Row(CHAT, b"{}", 415, "unsupported_media_type", headers={"content-type": ""}),
    Row(CHAT, b" " * ((8 << 20) + 1), 413, "request_too_large"),
]
PATHS = [
    Row(path, {}, 404, "unknown_url")
    for path in (
        "/v1/embeddings",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/v1/batches",
        "/v1/moderations",
        "/v1/responses/resp_1/cancel",
        "/v1/requests/x/cancel",
        "/nothing",
    )
] + [
    Row("/v1/requests/x", {}, 404, "unknown_url", method="DELETE"),
    Row(CHAT, {}, 405, "method_not_allowed", method="PUT"),
    Row("/v1/models/some/body", {}, 404, "model_not_found", method="GET"),
]
VALUES = [
    Row(path, make(**fields), 400, INVALID, next(iter(fields)))
    for path, make in ((CHAT, chat), (TEXT, text))
    for fields in (
        {"temperature": 2.1},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"presence_penalty": 3},
        {"frequency_penalty": -3},
        {"repetition_penalty": 0},
        {"logit_bias": {"99999999": 1}},
        {"logit_bias": {"5": 101}},
        {"seed": 1.5},
        {"seed": True},
        {"seed": 1 << 63},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"n": 0},
        {"n": 9},
        {"stop": ""},
        {"stop": ["a"] * 17},
        {"stop_token_ids": [1 << 20]},
        {"stream": "true"},
        {"stream_options": {"include_usage": True}},
        {"cache_salt": "a/b"},
        {"ignore_eos": 1},
        {"response_format": "json"},
        {"model": 7},
    )
] + [
    Row(CHAT, chat(response_format={"type": "xml"}), 400, INVALID, "response_format.type"),
    Row(
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}),
        400,
        "invalid_grammar",
        "response_format",
    ),
]
CHATS = [
    Row(CHAT, {}, 400, INVALID, "messages"),
    Row(CHAT, {"messages": []}, 400, INVALID, "messages"),
    Row(CHAT, {"messages": [{}]}, 400, INVALID, "messages[0].role"),
    Row(CHAT, {"messages": [123]}, 400, INVALID, "messages[0]"),
    Row(CHAT, {"messages": "Hi"}, 400, INVALID, "messages"),
    Row(CHAT, {"messages": [{"role": "user", "content": 123}]}, 400, INVALID, "messages[0].content"),
    Row(CHAT, {"messages": HELLO * 4097}, 400, INVALID, "messages"),
    *(
        Row(CHAT, {"messages": part(kind)}, 400, "unsupported_content", "messages[0].content[1].type")
        for kind in ("image_url", "input_audio", "file")
    ),
    Row(CHAT, chat(max_completion_tokens=0, max_tokens=5), 400, INVALID, "max_completion_tokens"),
    Row(CHAT, chat(top_logprobs=2), 400, INVALID, "top_logprobs"),
    Row(CHAT, chat(logprobs=True, top_logprobs=21), 400, INVALID, "top_logprobs"),
    Row(CHAT, chat(tool_choice="required"), 400, INVALID, "tool_choice"),
    Row(CHAT, chat(tools=[{"type": "web_search"}]), 400, INVALID, "tools[0].type"),
    Row(CHAT, chat(continue_final_message=True, add_generation_prompt=True), 400, INVALID, "continue_final_message"),
    Row(CHAT, {"messages": [{"role": "user", "content": "x " * 9000}]}, 400, "context_length_exceeded", "messages"),
]
TEXTS = [
    Row(TEXT, {}, 400, INVALID, "prompt"),
    *(Row(TEXT, {"prompt": prompt}, 400, INVALID, "prompt") for prompt in ("", [], ["a"] * 17, 5, [1 << 20])),
    Row(TEXT, {"prompt": [True]}, 400, INVALID, "prompt[0]"),
    Row(TEXT, {"prompt": [-1]}, 400, INVALID, "prompt[0]"),
    Row(TEXT, text(logprobs=1, echo=True), 400, INVALID, "logprobs"),
    Row(TEXT, text(logprobs=21), 400, INVALID, "logprobs"),
    Row(TEXT, text(best_of=2), 400, INVALID, "best_of"),
    Row(TEXT, {"prompt": [5] * 9000}, 400, "context_length_exceeded", "prompt"),
    Row(TEXT, {"prompt": [5] * 9000, "stream": True}, 400, "context_length_exceeded", "prompt"),
    Row(TEXT, {"prompt": ["a", "x " * 9000]}, 400, "context_length_exceeded", "prompt"),
    Row(TEXT, {"prompt": ["a", [5]]}, 400, INVALID, "prompt[0]"),
]
CANNOT = [
    Row(path, make(**{name: value}), 400, UNSUPPORTED, name)
    for path, make in ((CHAT, chat), (TEXT, text))
    for name, value in {
        "suffix": "x",
        "functions": [{}],
        "use_beam_search": True,
        "guided_json": {},
        "prompt_embeds": "x",
        "mm_processor_kwargs": {},
        "lora": "x",
        "adapters": "/etc/passwd",
        "modalities": ["audio"],
        "audio": {},
        "chat_template": "{{ x }}",
        "kv_transfer_params": {},
        "bootstrap_room": 7,
        "handoff_id": "0" * 32,
        "bad_words": ["x"],
        "allowed_token_ids": [5],
    }.items()
] + [
    Row(CHAT, chat(echo=True), 400, UNSUPPORTED, "echo"),
    Row(CHAT, chat(best_of=2), 400, UNSUPPORTED, "best_of"),
    Row(TEXT, text(tools=[{}]), 400, UNSUPPORTED, "tools"),
    Row(RESPONSES, {"input": "x", "background": True}, 400, UNSUPPORTED, "background"),
    Row(RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, 400, UNSUPPORTED, "previous_response_id"),
    Row(RESPONSES, {"input": "x", "max_output_tokens": 0}, 400, INVALID, "max_output_tokens"),
]
NAMES = [
    Row(path, body | {"model": name}, 404, "model_not_found")
    for path, body in ((CHAT, chat()), (TEXT, text()), (RESPONSES, {"input": "x"}))
    for name in ("nobody", "../../etc/passwd", "a\r\nX: y", "{tag}*", "m" * 10_000)
]
ROUTES = [
    Row(TEXT, text(), 400, INVALID, "X-Crossfill-Route", {"X-Crossfill-Route": route})
    for route in ("mlx", "a->b->c", "tpu->reference", "local:tpu")
]
ROWS = [*BODIES, *PATHS, *VALUES, *CHATS, *TEXTS, *CANNOT, *NAMES, *ROUTES]


def send(client: httpx.Client, row: Row) -> httpx.Response:
    content = row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()
    headers = {"content-type": "application/json"} | row.headers
    return client.request(row.method, row.path, content=content, headers=headers)


def check(row: Row, answer: httpx.Response) -> None:
    said = f"{row.method} {row.path} {str(row.body)[:200]}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code == row.status, said
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, said
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", row.code, row.param), said
    assert 0 < len(error["message"]) <= 500, said
    assert "x-should-retry" not in answer.headers, said
    assert answer.headers["x-request-id"], said


def traces(system: System) -> dict[str, Any]:
    """Everything that a request could have left: keys, credit, jobs, gauges, counters of work, what `/status` says."""
    keys = {key for key in system.broker.scan_iter("*", count=1000) if not key.startswith(LEASES)}
    status = system.status()
    for replica in status["replicas"]:  # a heartbeat old: what earlier requests left in them may still be on its way
        for counter in ("prompt_tokens_computed", "tokens_sampled", "cached_pages"):
            del replica["stats"][counter]
    return {
        "keys": {key for key in keys if key.startswith(b"cf:")},
        "jobs": {key for key in keys if key.startswith(b"rq:")},
        "queues": {key: system.broker.llen(key) for key in sorted(keys) if system.broker.type(key) == b"list"},
        "ended": system.broker.lrange("cf:recent", 0, -1),
        "metrics": metrics(system),
        "status": status,
    }


def metrics(system: System) -> dict[str, str]:
    """The API's that are not zero, but for those that count refusals."""
    found = re.findall(r"(?m)^(crossfill_\w+(?:\{[^}]*\})?) (\S+)$", system.http.get("/metrics").text)
    return {name: n for name, n in found if float(n) and not re.search("refused|_request_errors_|_created", name)}


def test_nothing_of_a_refused_request_stays_anywhere(cheap: System) -> None:
    cheap.settled()
    before = traces(cheap)
    for row in ROWS:
        check(row, send(cheap.http, row))
    after = traces(cheap)
    jobs = after.pop("jobs") - before.pop("jobs")  # those of earlier requests expire by and by
    assert jobs == set()
    assert after == before
