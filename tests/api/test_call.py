"""Calls of tools in a model's text: the three ways of writing them, piece by piece and at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.call import BareCalls, GivenCall, TaggedCalls, new_id
from pipeline.api.delta import CallArguments, CallBegin, Content, Delta, Reader
from tests.api.test_delta import read

NAMES = frozenset({"f", "get_weather"})
ARGS = '{"city": "Köln }{", "n": [1, {"a": "\\"</x>"}]}'
CALL = f'{{"name": "get_weather", "arguments": {ARGS}}}'


def ids() -> Callable[[], str]:
    numbers: Iterator[int] = count()
    return lambda: f"call_{next(numbers)}"


def tagged(parallel: bool = True) -> TaggedCalls:
    return TaggedCalls(NAMES, parallel=parallel, make_id=ids())


def bare(parallel: bool = True) -> BareCalls:
    return BareCalls(NAMES, parallel=parallel, make_id=ids())


def called(index: int, name: str, arguments: str) -> list[Delta]:
    return [CallBegin(index, f"call_{index}", name), CallArguments(index, arguments)]


WEATHER = called(0, "get_weather", ARGS)
TAGGED: list[tuple[str, list[Delta] | None]] = [
    (f"<tool_call>\n{CALL}\n</tool_call>", WEATHER),
    (f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", [Content("Let me see."), *WEATHER]),
    (
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>',
        [*WEATHER, *called(1, "f", "{}")],
    ),
    (f"<tool_call>{CALL}</tool_call>\nDone.", [*WEATHER, Content("Done.")]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', called(0, "f", '{"a": 1}')),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', called(0, "f", '{"a": 1}')),
    ('<tool_call>{"name": "f"}</tool_call>', called(0, "f", "{}")),
    (f"<tool_call>{CALL}", WEATHER),  # the closing tag may be a stop token
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        [CallBegin(0, "call_0", "f"), CallArguments(0, '{"a": 1')],
    ),
    # No calls: nothing is lost.
    ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', None),
    ("<tool_call>not JSON</tool_call> then", None),
    ('<tool_call>{"name": "f", "arg', None),
    ("a <tool_cal", None),
    ("a < b  <tool> ", None),
    ("", []),
]


@pytest.mark.parametrize(("text", "expected"), TAGGED)
def test_tagged(text: str, expected: list[Delta] | None) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(tagged(), text, cuts) == ([Content(text)] if expected is None else expected)


BARE: list[tuple[str, list[Delta] | None]] = [
    (CALL, WEATHER),
    (f"\n {CALL}\n", WEATHER),
    ('{"name": "f", "parameters": {"a": 1}}', called(0, "f", '{"a": 1}')),
    (f'[{CALL}, {{"name": "f", "arguments": {{}}}}]', [*WEATHER, *called(1, "f", "{}")]),
    (f'{CALL}; {{"name": "f", "parameters": {{}}}}', [*WEATHER, *called(1, "f", "{}")]),
    (f"{CALL} and text", [*WEATHER, Content("and text")]),
    ("Hello, {world}", None),
    ('{"answer": 42}', None),
    ('{"answer": 42} really', None),
    ("[1, 2]", None),
    ('[{"name": "other", "arguments": {}}]', None),
    ('{"name": "f"', None),
    (" [", None),
    ("", []),
]


@pytest.mark.parametrize(("text", "expected"), BARE)
def test_bare(text: str, expected: list[Delta] | None) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(bare(), text, cuts) == ([Content(text)] if expected is None else expected)


def test_one_call_alone() -> None:
    assert read(tagged(parallel=False), f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>x") == WEATHER
    assert read(bare(parallel=False), f"[{CALL}, {CALL}]") == WEATHER


def test_a_call_is_told_while_it_is_written() -> None:
    reader = tagged()
    told = [reader.feed(piece) for piece in ('<tool_call>{"name": "f", "argu', 'ments": {"a', '": 1}', "}</tool_call>")]
    assert told == [
        [],
        [CallBegin(0, "call_0", "f"), CallArguments(0, '{"a')],
        [CallArguments(0, '": 1}')],
        [],
    ]


def test_given() -> None:
    assert read(GivenCall("f", ids()), ARGS, [3, 9]) == called(0, "f", ARGS)
    assert read(GivenCall("f", ids()), "") == []


def test_ids_differ() -> None:
    assert len({new_id() for _ in range(100)}) == 100
    assert all(len(new_id()) == 29 for _ in range(3))


PARTS = [
    "<tool_call>",
    "</tool_call>",
    CALL,
    '{"name": "f", "arguments": {}}',
    " ",
    "\n",
    "a",
    "<",
    "{",
    "}",
    '"',
    "[",
    ",",
]


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=10),
    cuts=st.lists(st.integers(0, 300), max_size=10),
    parallel=st.booleans(),
    kind=st.sampled_from([tagged, bare]),
)
def test_any_cut_reads_the_same(
    parts: list[str], cuts: list[int], parallel: bool, kind: Callable[[bool], Reader]
) -> None:
    text = "".join(parts)
    whole = read(kind(parallel), text)
    assert read(kind(parallel), text, cuts) == whole
    if not any(isinstance(delta, CallBegin) for delta in whole):
        assert "".join(d.text for d in whole if isinstance(d, Content)) == text


@given(arguments=st.dictionaries(st.text(max_size=5), st.text(max_size=8) | st.integers() | st.none(), max_size=4))
def test_arguments_come_out_as_they_were_written(arguments: dict[str, object]) -> None:
    text = json.dumps({"name": "f", "arguments": arguments})
    if "</tool_call>" in text:
        return
    assert read(tagged(), f"<tool_call>{text}</tool_call>") == called(0, "f", json.dumps(arguments))
