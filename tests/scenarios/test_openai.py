"""openai-python against the running system: all four calls, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.scenarios.system import System

pytestmark = [pytest.mark.processes, pytest.mark.real_model, pytest.mark.timeout(300)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(real: System) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("route", ["vllm->mlx", "mlx->vllm", "auto"])
def test_all_four_calls(client: OpenAI, real: System, route: str) -> None:
    common = {"model": real.model, "max_tokens": 12, "temperature": 0, "extra_headers": {"X-Crossfill-Route": route}}
    whole = client.chat.completions.create(messages=QUESTION, **common)  # type: ignore[call-overload]
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(messages=QUESTION, stream=True, **common))  # type: ignore[call-overload]
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason

    text = client.completions.create(prompt="The capital of France is", **common)  # type: ignore[call-overload]
    parts = client.completions.create(prompt="The capital of France is", stream=True, **common)  # type: ignore[call-overload]
    assert "".join(c.choices[0].text for c in parts) == text.choices[0].text
    assert "Paris" in text.choices[0].text


COUNTRIES = ["France", "Italy", "Germany", "Spain", "Japan", "China", "Russia", "Egypt"]
COUNTRIES += ["Greece", "Poland", "Portugal", "Austria", "Cuba", "Peru", "England", "Norway"]


def test_sixteen_at_once_each_get_their_own_answer(real: System) -> None:
    """What each question is answered alone, it is answered in a crowd; and the answers differ."""
    routes = ["vllm->mlx", "mlx->vllm"]

    async def ask(client: AsyncOpenAI, index: int) -> str:
        answer = await client.completions.create(
            model=real.model,
            prompt=f"The capital of {COUNTRIES[index]} is",
            max_tokens=4,
            temperature=0,
            extra_headers={"X-Crossfill-Route": routes[index % 2]},
        )
        return answer.choices[0].text

    async def run() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=240) as client:
            alone = [await ask(client, index) for index in range(16)]
            return alone, await asyncio.gather(*(ask(client, index) for index in range(16)))

    alone, crowd = asyncio.run(run())
    assert crowd == alone
    assert len(set(alone)) >= 12
    assert "Paris" in alone[0]
    real.settled()


def test_seeded_sampling_repeats(client: OpenAI, real: System) -> None:
    def draw(seed: int, route: str) -> str:
        answer = client.completions.create(
            model=real.model,
            prompt="Once upon a time",
            max_tokens=16,
            temperature=0.9,
            top_p=0.95,
            seed=seed,
            extra_body={"top_k": 50},
            extra_headers={"X-Crossfill-Route": route},
        )
        return answer.choices[0].text

    for route in ("vllm->mlx", "mlx->vllm"):
        assert draw(7, route) == draw(7, route)
        assert len({draw(seed, route) for seed in range(4)}) > 1


@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_never_leaks(client: OpenAI, real: System, stream: bool) -> None:
    asked = {
        "model": real.model,
        "prompt": "Count: one, two, three, four, five, six,",
        "max_tokens": 32,
        "temperature": 0,
        "stop": [" nine"],
        "extra_headers": {"X-Crossfill-Route": "vllm->mlx"},
    }
    if stream:
        chunks = list(client.completions.create(stream=True, **asked))  # type: ignore[call-overload]
        text, finish = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(**asked).choices[0]  # type: ignore[call-overload]
        text, finish = choice.text, choice.finish_reason
    assert text.startswith(" seven, eight,")
    assert "nine" not in text
    assert finish == "stop"
    real.settled()


def test_errors_reach_the_client_with_code_and_param(client: OpenAI, real: System) -> None:
    with pytest.raises(NotFoundError) as unknown:
        client.completions.create(model="nobody", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as wrong:
        client.chat.completions.create(model=real.model, messages=QUESTION, temperature=9)  # type: ignore[arg-type]
    assert wrong.value.param == "temperature"
    assert real.status()["live"] == []
