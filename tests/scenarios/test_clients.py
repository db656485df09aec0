"""The clients people use, on real engines: openai-python, curl, and those of `.venv-clients` (`make env-clients`).

Each script of `tests/clients/` is one client in its own environment: it asks and prints what it understood.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.clients.question import LIMITS, QUESTION, ROUTE, SCHEMA, TOOL
from tests.scenarios.speech import Speech
from tests.scenarios.system import System

pytestmark = [pytest.mark.processes, pytest.mark.real_model, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients"
SCRIPTS = ROOT / "tests" / "clients"
BOTH_WAYS = ("vllm->mlx", "mlx->vllm")
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def present(path: Path) -> Path:
    if not path.exists():
        if os.environ.get("CROSSFILL_REQUIRE_CLIENTS"):
            pytest.fail(f"{path} is missing: remove {CLIENTS}, then make env-clients")
        pytest.skip("the clients are not installed (make env-clients)")
    return path


def able(system: System, *features: str) -> None:
    """Skip where an engine of this route publishes less."""
    for replica in system.status()["replicas"]:
        if lacking := set(features) - set(replica["features"]):
            pytest.skip(f"{replica['engine']} lacks {', '.join(sorted(lacking))}")


def ask(system: System, *command: str | Path) -> dict[str, Any]:
    argv = [*map(str, command), f"{system.url}/v1", system.model]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_PRELOAD"))}
    environ = {**clean, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def right(found: dict[str, Any]) -> None:
    """What every client must have understood."""
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]
    for name in ("call", "streamed_call"):
        if name in found:
            tool, arguments = found[name]
            assert tool == "look_up"
            valid(arguments)
    if "form" in found:
        valid(found["form"])
    assert found.get("usage") == found.get("streamed_usage")


def valid(answer: dict[str, Any]) -> None:
    """By the one schema of these tests."""
    assert set(answer) == set(SCHEMA["required"])
    assert answer["city"] in ("Paris", "Rome")
    assert isinstance(answer["large"], bool)


def test_langchain(real: System) -> None:
    able(real, "grammar")
    found = ask(real, present(CLIENTS / "bin" / "python"), SCRIPTS / "use_langchain.py")
    right(found)
    assert found["model"] == real.model
    assert "Rome" in found["completions"]
    real.settled()


def test_litellm(real: System) -> None:
    able(real, "grammar")
    found = ask(real, present(CLIENTS / "bin" / "python"), SCRIPTS / "use_litellm.py")
    right(found)
    assert found["refusal"] == "context window"
    real.settled()


def test_llamaindex(real: System) -> None:
    able(real, "grammar")
    found = ask(real, present(CLIENTS / "bin" / "python"), SCRIPTS / "use_llamaindex.py")
    right(found)
    assert "Rome" in found["completions"]
    assert found["completions"] == found["streamed_completions"]
    real.settled()


def test_node(real: System) -> None:
    able(real, "grammar")
    node = shutil.which("node") or pytest.skip("node is not installed: its client is left out")
    sdk = present(CLIENTS / "node")
    argv = [node, SCRIPTS / "use_openai.mjs", f"{real.url}/v1", real.model, sdk]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    right(found)
    assert found["response"] == found["response_streamed"] == found["text"]
    assert found["refusal"] == "400 temperature"
    real.settled()


@pytest.fixture
def client(real: System) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, default_headers=ROUTE) as opened:
        yield opened


def test_openai_python_tools_and_forms(client: Any, real: System) -> None:
    able(real, "grammar")
    common: Any = {"model": real.model, "messages": MESSAGES, **LIMITS}
    called = client.chat.completions.create(tools=[TOOL], tool_choice="required", **common)
    [call] = called.choices[0].message.tool_calls
    assert (called.choices[0].finish_reason, call.function.name) == ("tool_calls", "look_up")
    valid(json.loads(call.function.arguments))
    pieces = list(client.chat.completions.create(tools=[TOOL], tool_choice="required", stream=True, **common))
    parts = [part for chunk in pieces for part in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    valid(json.loads(client.chat.completions.create(response_format=form, **common).choices[0].message.content))

    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Paris"},
    ]
    after = client.chat.completions.create(model=real.model, messages=history, tools=[TOOL], **LIMITS)
    assert after.choices[0].message.content
    real.settled()


def test_openai_python_samples_and_logprobs(client: Any, real: System) -> None:
    able(real, "n", "logprobs")
    common: Any = {"model": real.model, "messages": MESSAGES, "max_tokens": 8}
    seeded = {"n": 3, "seed": 11, "temperature": 1.0}
    first = client.chat.completions.create(**common, **seeded)
    again = client.chat.completions.create(**common, **seeded)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **common, **seeded):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts

    scored = client.chat.completions.create(logprobs=True, top_logprobs=3, temperature=0, **common)
    content = scored.choices[0].logprobs.content
    assert bytes(b for entry in content for b in entry.bytes).decode() == scored.choices[0].message.content
    for entry in content:  # greedy: what was sampled is the likeliest
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob <= 0
    real.settled()


def test_openai_python_responses(client: Any, real: System) -> None:
    common: Any = {"model": real.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**common)
    assert "Paris" in whole.output_text
    events = list(client.responses.create(stream=True, **common))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.usage == whole.usage
    real.settled()


@pytest.mark.parametrize("route", BOTH_WAYS if os.environ.get("CROSSFILL_REQUIRE_CLIENTS") else BOTH_WAYS[:1])
def test_a_stream_is_the_whole_answer_byte_for_byte(real: System, route: str) -> None:
    """Emoji and scripts of several tokens a character, a stop across them, an end inside one."""
    able(real, "grammar", "logprobs")
    Speech(real.http, real.model, route).check(seeds=(1,), cuts=(2, 3, 4))
    real.settled()


def test_curl(real: System) -> None:
    """Streamed without buffering, and an error body that can be read."""
    curl = shutil.which("curl") or pytest.skip("curl is not installed")
    body = {"model": real.model, "messages": MESSAGES, **LIMITS, "stream": True}
    argv = [curl, "-sN", "-m", "300", f"{real.url}/v1/chat/completions", "-H", "content-type: application/json"]
    told = subprocess.run([*argv, "-d", json.dumps(body)], capture_output=True, text=True, check=True).stdout
    frames = [json.loads(line[6:]) for line in told.split("\n\n") if line.startswith("data: {")]
    assert "Paris" in "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
    assert told.endswith("data: [DONE]\n\n")
    told = subprocess.run([*argv, "-d", "{"], capture_output=True, text=True, check=True).stdout
    assert json.loads(told)["error"]["code"] == "invalid_json"
