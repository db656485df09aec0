"""Reasoning and content are told apart, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.delta import Content, Delta, PlainReader, Reader, Reasoning, ThinkReader, merge, overlap


def read(reader: Reader, text: str, cuts: list[int] | None = None) -> list[Delta]:
    """All deltas of `text`, fed in pieces that end at `cuts`, neighbours put together."""
    ends = sorted({min(cut, len(text)) for cut in cuts or []} | {len(text)})
    deltas: list[Delta] = []
    for start, end in zip([0, *ends], ends, strict=False):
        deltas += reader.feed(text[start:end])
    return merge([*deltas, *reader.end()])


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (False, "Hello", [Content("Hello")]),
        (False, "  Hello ", [Content("  Hello ")]),
        (False, "<think>why\nnot </think>\n\nYes", [Reasoning("why\nnot"), Content("Yes")]),
        (False, "\n<think>\nwhy</think>Yes <think>", [Reasoning("why"), Content("Yes <think>")]),
        (False, "<think></think>Yes", [Content("Yes")]),
        (False, "<think>cut off ", [Reasoning("cut off ")]),
        (False, "<thin", [Content("<thin")]),
        (False, "<thing> a", [Content("<thing> a")]),
        (False, "", []),
        (True, "why</think>\nYes", [Reasoning("why"), Content("Yes")]),
        (True, "\nwhy < because </thi", [Reasoning("why < because </thi")]),
        (True, "", []),
    ],
)
def test_thoughts(thinking: bool, text: str, expected: list[Delta]) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(ThinkReader(PlainReader(), thinking=thinking), text, cuts) == expected


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "<", "</", "think>", "é"]), max_size=12),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    thinking=st.booleans(),
)
def test_any_cut_reads_the_same(parts: list[str], cuts: list[int], thinking: bool) -> None:
    text = "".join(parts)
    whole = read(ThinkReader(PlainReader(), thinking=thinking), text)
    assert read(ThinkReader(PlainReader(), thinking=thinking), text, cuts) == whole


def test_content_leaves_at_once() -> None:
    reader = ThinkReader(PlainReader(), thinking=False)
    assert reader.feed("Yes") == [Content("Yes")]
    assert reader.feed(" <thin") == [Content(" <thin")]


def test_overlap() -> None:
    assert [overlap(text, "<ab>") for text in ("", "x", "x<", "x<a", "x<ab", "x<ab>", "<<")] == [0, 0, 1, 2, 3, 0, 1]
