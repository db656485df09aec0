"""Grammar: what the text of a request must match, checked here without any engine and compiled for one tokenizer.

A grammar is a JSON text with exactly one of the members in KINDS. llguidance compiles it and says, token by token,
which ids may follow. Only this module imports it, so that one grammar means the same on every engine.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from pipeline.errors import ConfigError, EngineError, InvalidParameterError

MAX_CHARS = 100_000
_CACHED = 64
# On one line, with one space at most: else a model that likes spaces may fill its whole answer with them.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

KINDS: dict[str, Callable[[Any], str]] = {
    "json_schema": lambda schema: LLMatcher.grammar_from_json_schema(schema, defaults=_JSON),
    "json_object": lambda _: LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_JSON),
    "regex": LLMatcher.grammar_from_regex,  # the whole text matches it
    "lark": LLMatcher.grammar_from_lark,  # llguidance's dialect: `%json {...}` embeds a schema, `<x>` is a token
}
_TYPES: dict[str, tuple[type, ...]] = {
    "json_schema": (dict, bool),
    "json_object": (bool,),
    "regex": (str,),
    "lark": (str,),
}


def encode(kind: str, value: object) -> str:
    """The text of a grammar: `encode("json_schema", {...})`, `encode("json_object", True)`, `encode("regex", "a+")`."""
    return json.dumps({kind: value}, separators=(",", ":"))


def check(text: str, param: str) -> None:
    """Raise InvalidParameterError, naming `param` and what is wrong, for a grammar that could not be compiled.

    Needs no tokenizer: names of special tokens are looked up by `Compiler` only.
    """
    try:
        fault = LLMatcher.validate_grammar(_source(text))
    except ValueError as error:
        fault = str(error)
    if fault:
        raise InvalidParameterError(
            param, f"`{param}` cannot be enforced: {_first_line(fault)}", code="invalid_grammar"
        )


class Matcher:
    """Where one text stands in its grammar. Not thread safe: it belongs to whoever draws the tokens."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self.eos_token_ids = tuple(eos_token_ids)  # one of these is all that may follow a text that is complete

    def allowed(self) -> bytes:
        """Bit i (little-endian) is set where token i may follow; at least as many bits as the vocabulary has ids."""
        bits = bytes(self._matcher.compute_bitmask())
        self._require_sound()
        return bits

    def consume(self, token_id: int) -> None:
        """Raises EngineError for a token that was not allowed."""
        self._matcher.consume_token(token_id)
        self._require_sound()

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}")


class Compiler:
    """Grammars for the tokenizer of one checkpoint directory, compiled once each. Thread safe.

    The tokenizer is read at the first use: it takes seconds where the vocabulary is large.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first

    def matcher(self, text: str, emitted: Sequence[int] = ()) -> Matcher:
        """At the start of a text, or behind the tokens of it that were `emitted` already.

        Raises InvalidParameterError for what cannot be compiled, ConfigError where the tokenizer cannot be read.
        """
        with self._lock:
            compiled = self._compiled.get(text) or self._compile(text)
            self._compiled[text] = compiled
            self._compiled.move_to_end(text)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
            fresh = Matcher(compiled.deep_copy(), self._eos_token_ids)
        for token_id in emitted:
            fresh.consume(token_id)
        return fresh

    def _compile(self, text: str) -> LLMatcher:
        compiled = LLMatcher(self._load(), _source(text), log_level=0)
        if compiled.is_error():
            fault = _first_line(compiled.get_error())
            raise InvalidParameterError("grammar", f"the grammar cannot be enforced: {fault}", code="invalid_grammar")
        return compiled

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            path = self._directory / "tokenizer.json"
            try:
                text = path.read_text(encoding="utf-8")
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path} cannot be read for grammars: {error}") from error
        return self._tokenizer


def _source(text: str) -> str:
    """llguidance's own form. Raises ValueError."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"it is longer than {MAX_CHARS} characters")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    kind, value = next(iter(raw.items())) if isinstance(raw, dict) and len(raw) == 1 else ("", None)
    if kind not in KINDS or not isinstance(value, _TYPES[kind]) or (kind == "json_object" and value is not True):
        raise ValueError(f"it must be an object with one of {', '.join(KINDS)}")
    return KINDS[kind](value)


def _first_line(fault: str) -> str:
    """llguidance appends the state of its parser."""
    return fault.strip().split("\n<state>", 1)[0].strip()[:500]
