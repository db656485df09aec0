"""Text: templates against their written outcome, detokenising against decoding everything at once."""

from __future__ import annotations

import codecs
import json
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from pipeline.api.text import Detokeniser, Text
from pipeline.errors import ConfigError, InvalidParameterError

WORDS = st.text(alphabet="aé\N{GRINNING FACE}\N{CJK UNIFIED IDEOGRAPH-4E2D} \n.", max_size=30)
USER = [{"role": "user", "content": "Hi"}]


def pieces(text: Text, prompt: list[int], token_ids: list[int], **options: bool) -> list[str]:
    detokeniser = Detokeniser(text, prompt, **options)
    return [*(detokeniser.push(token_id) for token_id in token_ids), detokeniser.flush()]


@settings(deadline=None)
@given(prompt=WORDS, answer=WORDS)
def test_pieces_join_to_the_whole_text(text: Text, prompt: str, answer: str) -> None:
    before = text.encode(prompt, add_special_tokens=False)
    after = text.encode(answer, add_special_tokens=False)
    assert "".join(pieces(text, before, after)) == answer


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(3, 1023), max_size=40))
def test_any_token_ids_join_to_what_the_library_decodes(text: Text, token_ids: list[int]) -> None:
    """But for the first bytes of a character at the end: the library makes U+FFFD of them, a client never sees them."""
    raw = b"".join(map(text.token_bytes, token_ids))
    assert raw.decode("utf-8", "replace") == text.decode(token_ids)
    assert "".join(pieces(text, [], token_ids)) == whole_characters(raw)


def whole_characters(raw: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def test_no_half_character_leaves(text: Text) -> None:
    token_ids = text.encode("x\N{GRINNING FACE}y", add_special_tokens=False)
    assert len(token_ids) >= 4  # the emoji is several tokens
    found = pieces(text, [], token_ids)
    assert all("\ufffd" not in piece for piece in found)
    assert [piece for piece in found if piece] == ["x", "\N{GRINNING FACE}", "y"]
    cut = pieces(text, [], token_ids[:2])
    assert cut == ["x", "", ""]  # the text ends inside the character


def test_a_replacement_character_of_the_models_own_is_text(text: Text) -> None:
    token_ids = text.encode("a\ufffd", add_special_tokens=False)
    assert "".join(pieces(text, [], token_ids)) == "a\ufffd"


def test_byte_fallback(text: Text) -> None:
    """SentencePiece vocabularies spell a character they do not have in bytes."""
    vocabulary = {"▁a": 0, "<0xF0>": 1, "<0x9F>": 2, "<0x98>": 3, "<0x80>": 4}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = Text(tokenizer)
    assert [fallback.token_bytes(token_id) for token_id in range(6)] == [b" a", b"\xf0", b"\x9f", b"\x98", b"\x80", b""]
    assert pieces(fallback, [0], [1, 2, 3, 4, 0]) == ["", "", "", "\N{GRINNING FACE}", " a", ""]
    assert pieces(fallback, [0], [0, 1, 2, 3, 4, 1, 2]) == [" a", "", "", "", "\N{GRINNING FACE}", "", "", ""]


def test_a_prompt_may_end_inside_a_character(text: Text) -> None:
    token_ids = text.encode("x\N{GRINNING FACE}y", add_special_tokens=False)
    assert "".join(pieces(text, token_ids[:2], token_ids[2:])) == "\N{GRINNING FACE}y"


def test_garbage_bytes_do_not_pile_up(text: Text) -> None:
    half = text.encode("\N{GRINNING FACE}", add_special_tokens=False)[0]
    found = pieces(text, [], [half] * 200)
    assert "".join(found) == text.decode([half] * 199)  # the last may still have become a character
    assert max(map(len, found)) <= 64


def test_special_tokens_are_silent_unless_wanted(text: Text) -> None:
    end = text.encode("<|im_end|>", add_special_tokens=False)
    assert end == [2]
    hello = text.encode("hello", add_special_tokens=False)
    assert "".join(pieces(text, [], hello + end * 100 + hello)) == "hellohello"
    assert "".join(pieces(text, [], hello + end, skip_special_tokens=False)) == "hello<|im_end|>"


def test_leading_spaces_of_a_decoder_that_strips_them() -> None:
    vocabulary = {"▁a": 0, "▁b": 1, "c": 2}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    text = Text(tokenizer)
    assert text.decode([0, 1, 2]) == "a bc"
    assert pieces(text, [0], [1, 2, 0, 1]) == [" b", "c", " a", " b", ""]
    assert pieces(text, [], [0, 1]) == ["a", " b", ""]


def template(tokenizer: Tokenizer, source: str) -> Text:
    return Text(tokenizer, source, {"eos_token": "</s>"}, clock=lambda: datetime(2024, 7, 26))


@pytest.fixture
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def test_the_checkpoints_own_template(text: Text) -> None:
    assert text.render(USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text.render(USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    half = [*USER, {"role": "assistant", "content": "Well, "}]
    assert text.render(half, add_generation_prompt=False, continue_final_message=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "
    )


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}", ""),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ eos_token }}", "</s>"),
        ("{% generation %}\n{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{{ tools is none }} {{ enable_thinking }}", "True off"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ],
)
def test_the_template_dialect(tokenizer: Tokenizer, source: str, rendered: str) -> None:
    options = {"enable_thinking": "off", "messages": "ours win", "eos_token": "ours win"}
    assert template(tokenizer, source).render(USER, options=options) == rendered


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 'a' + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_refuses_is_the_clients_error(tokenizer: Tokenizer, source: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        template(tokenizer, source).render(USER)
    assert caught.value.param == "messages"


def test_tools_reach_a_template_that_reads_them(tokenizer: Tokenizer) -> None:
    found = template(tokenizer, "{% for t in tools %}{{ t | tojson }}{% endfor %}")
    assert found.reads("tools")
    assert not found.reads("documents")
    assert found.render(USER, tools=[{"type": "function"}]) == '{"type": "function"}'
    assert not Text(tokenizer).reads("tools")


def test_what_a_template_says_reaches_the_client(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="no system role"):
        template(tokenizer, "{{ raise_exception('no system role') }}").render(USER)
    with pytest.raises(InvalidParameterError, match="no chat template"):
        Text(tokenizer).render(USER)


def test_broken_checkpoints_are_the_operators_error(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Text.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    assert Text.load(tmp_path).encode("hello", add_special_tokens=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(ConfigError, match="not valid Jinja"):
        Text.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("own file: {{ bos_token }}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "config", "bos_token": {"content": "<s>"}})
    )
    assert Text.load(tmp_path).render(USER) == "own file: <s>"
