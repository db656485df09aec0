"""Grammars against texts that are known to match or not, on the tiny checkpoint's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline import grammar
from pipeline.errors import ConfigError, EngineError, InvalidParameterError
from pipeline.grammar import Compiler, Matcher
from pipeline.sample import tiny

VOCAB, EOS = tiny.VOCAB, 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tokenizer")
    tiny.tokenizer().save(str(where / "tokenizer.json"))
    return where


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture
def compiler(directory: Path) -> Compiler:
    return Compiler(directory, VOCAB, [EOS])


def allowed(matcher: Matcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.allowed(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def follow(matcher: Matcher, ids: list[int]) -> bool:
    """Whether each id was allowed when its turn came."""
    for token_id in ids:
        if token_id not in allowed(matcher):
            return False
        matcher.consume(token_id)
    return True


@pytest.mark.parametrize(
    ("kind", "value", "right", "wrong"),
    [
        ("json_schema", PERSON, '{"name": "Ann", "age": 7}', '{"name": "Ann"}'),
        ("json_schema", PERSON, '{"name":"Ann","age":7}', '{"name":"Ann","age":7.5}'),
        ("json_schema", {"enum": ["red", "blue"]}, '"blue"', '"green"'),
        ("json_object", True, '{"a": [1, {"b": null}]}', "[1]"),
        ("regex", "[0-9]{3}-[a-f]+", "123-abc", "12-abc"),
        ("lark", 'start: "yes" | "no"', "no", "maybe"),
    ],
)
def test_only_what_matches_can_be_said(
    compiler: Compiler, tokenizer: Tokenizer, kind: str, value: Any, right: str, wrong: str
) -> None:
    text = grammar.encode(kind, value)
    grammar.check(text, "response_format")
    assert follow(compiler.matcher(text), [*tokenizer.encode(right).ids, EOS])
    assert not follow(compiler.matcher(text), [*tokenizer.encode(wrong).ids, EOS])


def test_a_complete_text_may_only_end(compiler: Compiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(grammar.encode("regex", "abc"))
    assert EOS not in allowed(matcher)
    assert follow(matcher, tokenizer.encode("abc").ids)
    assert allowed(matcher) == {EOS} == set(matcher.eos_token_ids)


@pytest.mark.parametrize(("text", "allowed"), [('{"a": 1, "b":2}', True), ('{"a":  1}', False), ('{\n"a":1}', False)])
def test_json_is_on_one_line_with_single_spaces(
    compiler: Compiler, tokenizer: Tokenizer, text: str, allowed: bool
) -> None:
    matcher = compiler.matcher(grammar.encode("json_object", True))
    assert follow(matcher, tokenizer.encode(text).ids) is allowed


def test_every_matcher_is_its_own(compiler: Compiler, tokenizer: Tokenizer) -> None:
    text = grammar.encode("regex", "abc")
    first, second = compiler.matcher(text), compiler.matcher(text)
    assert follow(first, tokenizer.encode("abc").ids)
    assert follow(second, tokenizer.encode("abc").ids)


def test_a_text_is_taken_up_where_it_was(compiler: Compiler, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('{"name": "Ann", "age": 7}').ids
    whole = compiler.matcher(grammar.encode("json_schema", PERSON))
    assert follow(whole, ids[:5])
    resumed = compiler.matcher(grammar.encode("json_schema", PERSON), ids[:5])
    assert allowed(resumed) == allowed(whole)


def test_a_forbidden_token_is_an_error(compiler: Compiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(grammar.encode("regex", "abc"))
    with pytest.raises(EngineError, match="cannot be followed"):
        matcher.consume(tokenizer.encode("z").ids[0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[" * 90_000, "not JSON"),
        ("[]", "one of json_schema"),
        ("{}", "one of json_schema"),
        ('{"regex": "a", "lark": "b"}', "one of json_schema"),
        ('{"yaml": "a"}', "one of json_schema"),
        ('{"regex": 1}', "one of json_schema"),
        ('{"json_object": false}', "one of json_schema"),
        (grammar.encode("regex", "[a-"), "unclosed character class"),
        (grammar.encode("lark", "start: foo"), "unknown name"),
        (grammar.encode("json_schema", {"type": "strin"}), "Invalid type: strin"),
        (grammar.encode("json_schema", {"unevaluatedProperties": False}), "Unimplemented keys"),
        (grammar.encode("json_schema", {"type": "string", "pattern": "(?=a)"}), "look-around"),
        (grammar.encode("json_schema", {"$ref": "https://example.org/schema"}), "does not fetch"),
        (grammar.encode("regex", "a" * grammar.MAX_CHARS), "longer than"),
    ],
)
def test_what_cannot_be_enforced_is_refused(compiler: Compiler, text: str, why: str) -> None:
    with pytest.raises(InvalidParameterError, match=why) as caught:
        grammar.check(text, "response_format")
    assert (caught.value.param, caught.value.reason) == ("response_format", "invalid_grammar")
    assert "<state>" not in str(caught.value)


def test_an_unknown_special_token_is_found_when_compiling(compiler: Compiler) -> None:
    known = grammar.encode("lark", 'start: <|im_start|> "a"')
    assert allowed(compiler.matcher(known)) == {1}
    with pytest.raises(InvalidParameterError, match="no_such"):
        compiler.matcher(grammar.encode("lark", 'start: <|no_such|> "a"'))


def test_grammars_are_compiled_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    compile_once = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda text: seen.append(text) or compile_once(text))  # type: ignore[func-returns-value]
    texts = [grammar.encode("regex", f"a{{{count}}}") for count in range(1, 70)]
    for text in (texts[0], texts[0], *texts):
        compiler.matcher(text)
    assert seen == texts
    compiler.matcher(texts[0])  # pushed out by the others
    assert seen == [*texts, texts[0]]


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Compiler(tmp_path, VOCAB, [EOS]).matcher(grammar.encode("regex", "a"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": None}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Compiler(tmp_path, VOCAB, [EOS]).matcher(grammar.encode("regex", "a"))
