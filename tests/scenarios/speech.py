"""Speech: texts that any model can be made to say, of emoji and scripts whose characters are several tokens each.

A grammar leaves the choice between a few texts to the seed, and how they are cut into tokens to the temperature. What
comes is known to the byte, however it is asked for: whole or streamed, with a stop in its middle, cut off anywhere.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import httpx

TEXTS = (
    "\N{GRINNING FACE}\N{ROCKET}漢字नमस्ते",
    "漢字仮名\N{THUMBS UP SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}é!",
    "é\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}\N{CJK UNIFIED IDEOGRAPH-4E2D} ok",
)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_FORM = {"type": "json_schema", "json_schema": {"name": "said", "schema": {"enum": list(TEXTS)}}}


class Said(NamedTuple):
    """`raw`: the bytes of all tokens, where a chat was asked: more than the text where that ends inside a character."""

    text: str
    finish: str
    tokens: int
    raw: bytes = b""


class Speech:
    """Asks one system by one route, each question whole and streamed: the two must be one answer."""

    def __init__(self, http: httpx.Client, model: str, route: str, path: str = CHAT) -> None:
        self._http = http
        self._headers = {"X-Crossfill-Route": route}
        self._path = path
        question = (
            {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True} if path == CHAT else {"prompt": "Hi"}
        )
        self._asked = {"model": model, "temperature": 1.3, "max_tokens": 80, "response_format": _FORM, **question}

    def said(self, seed: int, **fields: Any) -> Said:
        asked = self._asked | {"seed": seed} | fields
        whole = self._whole(asked)
        assert self._streamed(asked) == whole
        assert "\N{REPLACEMENT CHARACTER}" not in whole.text
        return whole

    def check(self, seeds: tuple[int, ...], cuts: tuple[int, ...]) -> None:
        """Whole texts of these seeds; of the first one also a stop across tokens, and its first few tokens alone."""
        texts = [self.said(seed) for seed in seeds]
        for each in texts:
            assert (json.loads(each.text) in TEXTS, each.finish) == (True, "stop")
        text = texts[0].text
        stopped = self.said(seeds[0], stop=[text[3:5], "never"])
        assert (stopped.text, stopped.finish) == (text[:3], "stop")
        assert stopped.tokens < texts[0].tokens
        inside = 0
        for tokens in cuts:
            cut = self.said(seeds[0], max_tokens=tokens)
            assert (cut.finish, cut.tokens) == ("length", tokens)
            assert text.startswith(cut.text)
            if self._path == CHAT:
                assert cut.raw.decode(errors="ignore") == cut.text
                inside += cut.raw != cut.text.encode()
        assert inside or self._path == TEXT, "no cut was inside a character"

    def _whole(self, asked: dict[str, Any]) -> Said:
        answer = self._http.post(self._path, json=asked, headers=self._headers)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        [choice] = found["choices"]
        text = choice["message"]["content"] if self._path == CHAT else choice["text"]
        return Said(text, choice["finish_reason"], found["usage"]["completion_tokens"], _raw(choice))

    def _streamed(self, asked: dict[str, Any]) -> Said:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = self._http.post(self._path, json=asked | options, headers=self._headers)
        *frames, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        *chunks, usage = [json.loads(frame.removeprefix("data: ")) for frame in frames if frame != ": keep-alive"]
        choices = [chunk["choices"][0] for chunk in chunks]
        if self._path == CHAT:
            assert choices.pop(0)["delta"] == {"role": "assistant", "content": ""}
            assert choices[-1]["delta"] == {}
            pieces = [choice["delta"]["content"] for choice in choices[:-1]]
        else:
            assert choices[-1]["text"] == ""
            pieces = [choice["text"] for choice in choices[:-1]]
        assert all(pieces), "an empty chunk"
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        tokens = usage["usage"]["completion_tokens"]
        return Said("".join(pieces), choices[-1]["finish_reason"], tokens, b"".join(map(_raw, choices)))


def _raw(choice: dict[str, Any]) -> bytes:
    entries = (choice["logprobs"] or {}).get("content", ())
    return bytes(byte for entry in entries for byte in entry["bytes"])
