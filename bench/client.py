"""Client: one streamed completion against a running system, timed at the client."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. `ttft_ms` at the first non-empty text, `step_ms` the mean time between later texts."""

    route: str
    prompt_tokens: int
    ttft_ms: float
    step_ms: float
    texts: int
    trace: dict[str, Any]
    text: str = ""
    tokens: int = 0  # of the answer


def stream(
    client: httpx.Client, model: str, prompt: list[int], route: str, max_tokens: int, salt: str | None = None
) -> Sample:
    """Greedy; without a `salt` no prefix of an earlier sample is hit. Raises RuntimeError on an error frame."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "cache_salt": salt or secrets.token_hex(8),
        "stream_options": {"include_usage": True},
    }
    headers = {"X-Crossfill-Route": route, "X-Crossfill-Trace": "1"}
    times: list[float] = []
    texts: list[str] = []
    tokens = 0
    trace: dict[str, Any] = {}
    start = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise RuntimeError(answer.read().decode())
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            trace = chunk.get("crossfill") or trace
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            if text := "".join(choice["text"] for choice in chunk["choices"]):
                times.append(time.perf_counter())
                texts.append(text)
    times = times or [time.perf_counter()]  # no token of it was visible
    step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    return Sample(route, len(prompt), (times[0] - start) * 1e3, step * 1e3, len(times), trace, "".join(texts), tokens)
