"""Chat: one streamed question to a running API, by the OpenAI wire format and nothing else of ours but two headers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.cli.client import open_url
from pipeline.errors import CrossfillError

TIMEOUT_S = 120.0  # between two lines; the API sends a comment every 10 s while it waits


class ChatError(CrossfillError):
    """The API refused the question or broke the answer off; its message is ours."""

    code = "chat_failed"


class Answer:
    """Iterate for pieces of text; `trace`, `finish` and `usage` are filled in by then. Raises ChatError."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = lines
        self.trace: dict[str, Any] = {}
        self.usage: dict[str, Any] = {}
        self.finish: str | None = None

    def __iter__(self) -> Iterator[str]:
        for chunk in events(self._lines):
            if error := chunk.get("error"):
                raise ChatError(str(error.get("message", error)))
            self.trace = chunk.get("crossfill") or self.trace
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk.get("choices", ()):
                self.finish = choice.get("finish_reason") or self.finish
                if text := choice.get("delta", {}).get("content"):
                    yield text


def ask(url: str, body: dict[str, Any], route: str) -> Answer:
    """POST the chat request `body` to the API at `url`, streamed and traced, by `route` ("vllm->mlx"). ChatError."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode(),
        {"Content-Type": "application/json", "X-Crossfill-Route": route, "X-Crossfill-Trace": "1"},
    )
    try:
        return Answer(open_url(request, TIMEOUT_S))
    except urllib.error.HTTPError as error:
        raise ChatError(f"HTTP {error.code}: {_message(error.read())}") from error
    except OSError as error:
        raise ChatError(f"no answer from {url}: {error}") from error


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`. Comments and other fields are passed over.

    Raises ChatError when the stream ends without `[DONE]`: a cut connection must not look like an answer.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise ChatError("the stream ended without [DONE]")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
