"""Reading a streamed answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from pipeline.cli.chat import Answer, ChatError, ask, events


def sse(*chunks: dict[str, Any] | str) -> list[bytes]:
    return [f"data: {c if isinstance(c, str) else json.dumps(c)}\n".encode() for c in chunks]


def delta(text: str | None = None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {} if text is None else {"content": text}, "finish_reason": finish}]}


def test_text_finish_usage_and_trace() -> None:
    last = {"choices": [], "usage": {"prompt_tokens": 9}, "crossfill": {"pages": 2}}
    lines = [b": keep-alive\n", b"\n", *sse(delta(""), delta("Hel"), delta("lo"), delta(finish="stop"), last, "[DONE]")]
    answer = Answer(lines)
    assert list(answer) == ["Hel", "lo"]
    assert (answer.finish, answer.usage, answer.trace) == ("stop", {"prompt_tokens": 9}, {"pages": 2})


def test_what_follows_done_is_not_read() -> None:
    assert list(events(sse({"a": 1}, "[DONE]", {"a": 2}))) == [{"a": 1}]


def test_a_cut_stream_is_an_error() -> None:
    answer = Answer(sse(delta("Hel")))
    pieces = iter(answer)
    assert next(pieces) == "Hel"
    with pytest.raises(ChatError, match="ended without"):
        next(pieces)


def test_an_error_frame_is_an_error() -> None:
    with pytest.raises(ChatError, match="engine lost"):
        list(Answer(sse({"error": {"message": "engine lost", "code": "x"}}, "[DONE]")))


class Api(BaseHTTPRequestHandler):
    """Answers every POST with what the test put into `answer`, and notes what it was asked."""

    answer: ClassVar[tuple[int, bytes]]
    asked: ClassVar[list[tuple[str, dict[str, str], dict[str, Any]]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        status, text = self.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Api, "asked", [], raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody there: the client must not ask it
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "answer", (200, b"".join(sse(delta("hi"), "[DONE]"))), raising=False)
    assert list(ask(url, {"model": "m"}, "vllm->mlx")) == ["hi"]
    [(path, headers, body)] = Api.asked
    assert path == "/v1/chat/completions"
    assert (headers["x-crossfill-route"], headers["x-crossfill-trace"]) == ("vllm->mlx", "1")
    assert body == {"model": "m", "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("body", "message"),
    [(b'{"error": {"message": "no such model"}}', "HTTP 404: no such model"), (b"<html>", "HTTP 404: <html>")],
)
def test_a_refusal_says_why(url: str, monkeypatch: pytest.MonkeyPatch, body: bytes, message: str) -> None:
    monkeypatch.setattr(Api, "answer", (404, body), raising=False)
    with pytest.raises(ChatError, match=message):
        ask(url, {}, "auto")


def test_nobody_there() -> None:
    with pytest.raises(ChatError, match="no answer from"):
        ask("http://127.0.0.1:9", {}, "auto")
