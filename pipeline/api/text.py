"""Text: chat template, tokeniser and the way back from token ids to text, read from a checkpoint directory.

The prompt is tokenised here, once, and both engines get these ids. Needs no `transformers`: the template dialect
is Jinja with the few additions that chat templates rely on, in an immutable sandbox (templates are data).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pipeline.checkpoint import chat_template
from pipeline.checkpoint.config import read_json
from pipeline.errors import ConfigError, InvalidParameterError

Message = Mapping[str, Any]
Clock = Callable[[], datetime]
_CONTINUE = "\N{OBJECT REPLACEMENT CHARACTER}continue here\N{OBJECT REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6  # of the prompt: enough for a decoder that treats the first word specially
_PENDING_TOKENS = 64  # a character is at most 4 byte tokens; a longer run is no character in the making
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece vocabularies write a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Text:
    """The tokeniser and the chat template of one checkpoint. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        clock: Clock = datetime.now,
    ) -> None:
        """`special_tokens` are template variables; `clock` is what `strftime_now` of a template tells."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.template = template or ""
        environment = _environment(clock)
        self._template = environment.from_string(template) if template else None
        self._variables = meta.find_undeclared_variables(environment.parse(self.template))
        self._decoder = _decoder_kinds(tokenizer)
        self._special_tokens = dict(special_tokens or {})
        added = tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = {i for i, token in added.items() if token.special}

    @classmethod
    def load(cls, directory: Path, *, clock: Clock = datetime.now) -> Text:
        """Raises ConfigError naming the file that is missing or cannot be read."""
        path = directory / "tokenizer_config.json"
        config = read_json(path) if path.exists() else {}
        try:
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"tokenizer.json of the model cannot be read: {error}") from error
        try:
            return cls(tokenizer, chat_template(directory), _special_tokens(config), clock=clock)
        except TemplateError as error:
            raise ConfigError(f"the chat template of the model is not valid Jinja: {error}") from error

    def reads(self, variable: str) -> bool:
        """Whether the chat template looks at it, `tools` for example."""
        return variable in self._variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. `options` are the client's own template variables; ours win.

        Raises InvalidParameterError when the model has no template or the template refuses these messages.
        """
        if self._template is None:
            raise InvalidParameterError("messages", "This model has no chat template: use /v1/completions.")
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_CONTINUE}"}]
        variables = {**(options or {}), **self._special_tokens, "messages": messages}
        variables |= {"tools": tools, "documents": None}
        try:
            text = self._template.render(variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program: whatever it raises, it refuses
            raise InvalidParameterError(
                "messages", f"The model's chat template refuses these messages: {error}"
            ) from error
        return _cut(text) if continue_final_message else text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character; none for an id without a token.

        Byte-level vocabularies write a byte as one character (GPT-2's table), byte fallback as `<0xE4>`.
        """
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return str(token).encode()
        if "ByteLevel" in self._decoder:
            return b"".join(_BYTES.get(character) or character.encode() for character in token)
        if "ByteFallback" in self._decoder and (match := _BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return str(token).replace(_SPACE, " ").encode()

    def silent(self, token_id: int) -> bool:
        """No text by rule: a special token, or an id of the padded vocabulary that the tokeniser does not know."""
        return token_id in self._special_ids or self._tokenizer.id_to_token(token_id) is None


class Detokeniser:
    """Token ids in, text out, one token at a time; a character is held back until all its bytes are there.

    Decodes only the tokens since the last clean cut, with a few tokens before it as context: a decoder that
    strips the first space must not do so in the middle of a text.
    """

    def __init__(self, text: Text, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._text = text
        self._skip = skip_special_tokens
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._fresh = 0  # tokens at the end of the window whose text has not left
        self._known = self._decode().rstrip(_UNKNOWN)  # a prompt may end inside a character

    def push(self, token_id: int) -> str:
        """The text that this token completes, often the token's own, sometimes nothing."""
        if self._skip and self._text.silent(token_id):
            return ""
        self._window.append(token_id)
        self._fresh += 1
        text = self._decode()
        if text.endswith(_UNKNOWN) and self._fresh < _PENDING_TOKENS:
            return ""
        return self._cut(text)

    def flush(self) -> str:
        """The end: whatever is left but the first bytes of a character whose last ones never came."""
        if not self._fresh:
            return ""
        window, tail = self._window, self._unfinished()
        while tail and len(last := self._text.token_bytes(window[-1])) <= len(tail):
            window, tail = window[:-1], tail[: len(tail) - len(last)]
        text = self._text.decode(window, skip_special_tokens=self._skip)
        return self._cut(text.removesuffix(_UNKNOWN) if tail else text)

    def _unfinished(self) -> bytes:
        """The bytes at the end that no character can be made of yet."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in self._window[-self._fresh :]:
            decoder.decode(self._text.token_bytes(token_id))
        return decoder.getstate()[0]

    def _cut(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:  # tokens without text stay in the window until text follows them
            self._window = self._window[-self._fresh :]
            self._fresh = 0
            self._known = self._decode()
        return new

    def _decode(self) -> str:
        return self._text.decode(self._window, skip_special_tokens=self._skip)


def _decoder_kinds(tokenizer: Tokenizer) -> frozenset[str]:
    """The names of the steps by which the tokeniser turns tokens into text."""
    if tokenizer.decoder is None:
        return frozenset()
    found = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(step["type"] for step in (found, *found.get("decoders", ())))


def _byte_table() -> dict[str, bytes]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from U+0100 on, in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): bytes([b]) for b in plain} | {chr(256 + n): bytes([b]) for n, b in enumerate(others)}


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; for a prompt it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    return environment


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _cut(text: str) -> str:
    at = text.rfind(_CONTINUE)
    if at < 0:
        raise InvalidParameterError("continue_final_message", "The chat template does not show the final message.")
    return text[:at]


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kin, as templates name them; an entry is a text or an object with `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


_BYTES = _byte_table()
