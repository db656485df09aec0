"""Tokenizer: spellings that give the same ids agree, and whatever changes an id is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.tokenizer import chat_template, differences, read_tokenizer, tokenizer_digest
from pipeline.errors import ConfigError
from pipeline.sample.tiny import CHAT_TEMPLATE
from tests.checkpoint.conftest import Copy, edit

Change = Callable[[dict[str, Any]], object]


def changed(directory: Path, change: Change) -> Path:
    path = directory / "tokenizer.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return directory


def join_merges(raw: dict[str, Any]) -> None:
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]


def swap_first_merges(raw: dict[str, Any]) -> None:
    merges = raw["model"]["merges"]
    merges[:2] = merges[1::-1]


@pytest.mark.parametrize(
    "change",
    [
        join_merges,
        lambda raw: raw["model"].pop("ignore_merges"),
        lambda raw: raw["model"].update(vocab=dict(reversed(raw["model"]["vocab"].items()))),
        lambda raw: raw.update(decoder=None),
        lambda raw: raw.update(truncation={"max_length": 8}, version="2.0"),
        lambda raw: raw["added_tokens"].reverse(),
    ],
)
def test_other_spellings_of_the_same_ids_agree(copy: Copy, originals: dict[str, Path], change: Change) -> None:
    assert tokenizer_digest(changed(copy(), change)) == tokenizer_digest(originals["llama"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda raw: raw["pre_tokenizer"].update(add_prefix_space=True), ["pre_tokenizer"]),
        (lambda raw: raw.update(normalizer={"type": "NFC"}), ["normalizer"]),
        (lambda raw: raw["model"].update(byte_fallback=True), ["model"]),
        (lambda raw: raw["model"]["vocab"].pop("Ġthe"), ["vocab['Ġthe']"]),
        (lambda raw: raw["model"]["vocab"].update({"!": 7}), ["vocab['!']"]),
        (lambda raw: raw["added_tokens"][2].update(content="<end>"), ["added['2']"]),
        (lambda raw: raw["added_tokens"].pop(), ["added['2']"]),
        (swap_first_merges, ["merges[0]"]),
        (lambda raw: raw["model"]["merges"].pop(), ["merges"]),
    ],
)
def test_what_changes_ids_changes_the_digest_and_is_named(
    copy: Copy, originals: dict[str, Path], change: Change, named: list[str]
) -> None:
    other = changed(copy(), change)
    assert tokenizer_digest(other) != tokenizer_digest(originals["llama"])
    found = differences(read_tokenizer(originals["llama"]), read_tokenizer(other))
    assert [name for name, _, _ in found] == named


def test_a_missing_tokenizer_says_what_to_do(copy: Copy) -> None:
    directory = copy()
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: fetch it"):
        read_tokenizer(directory)


@pytest.mark.parametrize(
    "content", ["{}", '{"model": {}}', '{"model": {"vocab": [["a", 0.5, 1]]}, "added_tokens": []}']
)
def test_what_is_no_tokenizer_is_refused(copy: Copy, content: str) -> None:
    directory = copy()
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        read_tokenizer(directory)


def test_the_chat_template_is_found_in_either_place_and_counts_for_no_digest(copy: Copy) -> None:
    directory = copy()
    before = tokenizer_digest(directory)
    assert chat_template(directory) == CHAT_TEMPLATE
    (directory / "chat_template.jinja").write_text("own file")
    assert chat_template(directory) == "own file"
    (directory / "chat_template.jinja").unlink()
    edit(directory / "tokenizer_config.json", chat_template=...)
    assert chat_template(directory) is None
    assert tokenizer_digest(directory) == before
