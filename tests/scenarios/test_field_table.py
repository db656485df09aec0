"""300 requests drawn from the table of fields, good and bad, at once: each its status, and nothing stays anywhere."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, NamedTuple

import httpx
import pytest

from tests.scenarios.system import System

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
COUNT, AT_ONCE = 300, 24
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# field -> (values that are served, values that are refused)
BOTH: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([None, 0, 0.7, 2], [-0.1, 2.1, "1", True, []]),
    "top_p": ([None, 0.1, 1], [0, 1.5, "x"]),
    "top_k": ([None, -1, 0, 5], [-2, 1.5]),
    "min_p": ([None, 0, 0.2], [-1, 2]),
    "seed": ([None, 0, -5, 1 << 40], [1 << 63, 1.5, True]),
    "max_tokens": ([1, 2, 3], [-1, "5", 1.5]),
    "stop": ([None, "x", ["a", "b"], []], ["", [""], ["a"] * 17, 5]),
    "stop_token_ids": ([None, [], [5]], [[1 << 20], [-1], "x"]),
    "presence_penalty": ([None, 0, 1.5], [3, "x"]),
    "frequency_penalty": ([None, -1], [-3]),
    "repetition_penalty": ([None, 1.3], [0, -1]),
    "logit_bias": ([None, {}, {"7": -5}], [{"x": 1}, {"99999": 1}, {"5": 1000}, []]),
    "min_tokens": ([None, 0, 1], [100_000, -1]),
    "n": ([None, 1, 2, 3], [0, 9, 1.5]),
    "stream": ([None, False, True], ["true", 1]),
    "ignore_eos": ([None, True, False], [1]),
    "skip_special_tokens": ([None, False], ["no"]),
    "cache_salt": ([None, "tenant"], ["", "a/b"]),
    "user": ([None, "me"], []),
    "metadata": ([{"a": "b"}], []),
    "store": ([True, False], []),
    "no_such_field": ([{"deep": [1]}], []),
    "model": ([None], [7]),
    "suffix": ([None, ""], ["x"]),
    "prompt_embeds": ([None], ["x"]),
    "kv_transfer_params": ([None], [{}]),
    "chat_template": ([None], ["{{ x }}"]),
}
CHATS: dict[str, tuple[list[Any], list[Any]]] = {
    "messages": (
        [
            [{"role": "user", "content": "Hi"}],
            [
                {"role": "developer", "content": "Be brief"},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
            [{"role": "user", "content": "x " * 300}],
        ],
        [[], [{}], "Hi", [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}]],
    ),
    "max_completion_tokens": ([None, 2], [0, -1]),
    "logprobs": ([None, True, False], [3]),
    "tools": ([None, [], [FUNCTION]], [[FUNCTION, FUNCTION], [{}], "f"]),
    "tool_choice": ([None, "none"], ["maybe", 5]),
    "echo": ([False], [True]),
}
TEXTS: dict[str, tuple[list[Any], list[Any]]] = {
    "prompt": (
        ["Once", [5, 6, 7], ["a", "b"], [[5], [6, 7]], list(range(3, 203))],
        ["", [], [[]], [True], [-1], [1 << 20], ["a"] * 17, 5, [3] * 9000],
    ),
    "echo": ([None, False], ["yes"]),
    "logprobs": ([None, 0, 3], [True, 21, -1]),
    "best_of": ([None], [99]),
}
RAW = [b"", b"{", b"[]", b'{"a": NaN}', b"\xff{}", b'{"a": "\\ud800"}', b'{"a":' * 200, b'{"temperature": 1e999}']


class Asked(NamedTuple):
    path: str
    body: bytes
    bad: bool
    stream: bool


FEATURES = {  # what an engine may lack, by field
    "logprobs": "logprobs",
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "repetition_penalty": "penalties",
    "min_p": "min_p",
    "logit_bias": "logit_bias",
    "min_tokens": "min_tokens",
    "n": "n",
}


def draw(random_: random.Random, features: set[str]) -> Asked:
    """A good request that engines with `features` can serve, then in half of all cases one field of it made bad."""
    if random_.random() < 0.05:
        return Asked(random_.choice((CHAT, TEXT, RESPONSES)), random_.choice(RAW), True, False)
    path, own, needed = random_.choice(((CHAT, CHATS, "messages"), (TEXT, TEXTS, "prompt")))
    table = BOTH | own
    names = [*random_.sample(sorted(table), 6), needed, "max_tokens"]
    able = [name for name in names if FEATURES.get(name, "") in {"", *features}]
    body = {name: random_.choice(table[name][0]) for name in able}
    if bad := random_.random() < 0.5:
        name = random_.choice([name for name in names if table[name][1]])
        body[name] = random_.choice(table[name][1])
    return Asked(path, json.dumps(body).encode(), bad, body.get("stream") is True)


async def ask(client: httpx.AsyncClient, gate: asyncio.Semaphore, asked: Asked) -> None:
    async with gate:
        answer = await client.post(asked.path, content=asked.body, headers={"content-type": "application/json"})
    said = f"{asked.body[:300]!r}: {answer.status_code} {answer.text[:300]}"
    if asked.bad:
        assert answer.status_code == 400, said
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, said
    elif asked.stream:
        assert answer.status_code == 200, said
        assert answer.text.endswith("data: [DONE]\n\n"), said
        assert '"error"' not in answer.text, said
    else:
        assert answer.status_code == 200, said
        assert all(choice["finish_reason"] in ("stop", "length") for choice in answer.json()["choices"]), said


@pytest.mark.parametrize("seed", [7])
def test_the_right_status_for_each(cheap: System, seed: int) -> None:
    free = {r["name"]: r["stats"]["free_pages"] for r in cheap.settled()["replicas"]}
    random_ = random.Random(seed)
    features = set.intersection(*(set(r.get("features", ())) for r in cheap.status()["replicas"]))
    drawn = [draw(random_, features) for _ in range(COUNT)]
    assert 100 < sum(asked.bad for asked in drawn) < 200

    async def run() -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(base_url=cheap.url, timeout=400) as client:
            await asyncio.gather(*(ask(client, gate, asked) for asked in drawn))

    asyncio.run(run())
    after = cheap.settled()
    assert {r["name"]: r["stats"]["free_pages"] for r in after["replicas"]} == free
    assert cheap.complete([5, 6, 7], "reference->reference").finish == "length"
