"""Output: texts are the same however D's tokens were grouped, and log-probabilities go with their text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.output import Output, Piece
from pipeline.api.stop import StopMatcher
from pipeline.api.text import Detokeniser, Text
from pipeline.logprob import TokenLogprob

ALPHABET = "ab \N{GRINNING FACE}\N{CJK UNIFIED IDEOGRAPH-4E2D}é."
EOS = 2


def output(text: Text, stops: list[str], *, include: bool = False) -> Output:
    return Output(Detokeniser(text, [5, 6]), StopMatcher(stops, include=include), include_stop=include)


def run(made: Output, token_ids: list[int], finish: str, sizes: list[int], *, scored: bool = False) -> list[Piece]:
    """All pieces, with the tokens in groups of these sizes (over and over)."""
    pieces, at, turn = [], 0, 0
    while at < len(token_ids) and made.finish is None:
        group = token_ids[at : at + sizes[turn % len(sizes)]]
        at, turn = at + len(group), turn + 1
        scores = [TokenLogprob(token_id, -1.0) for token_id in group] if scored else None
        pieces.append(made.feed(group, finish if at >= len(token_ids) else None, scores))
    return pieces


def simple(written: str, stops: list[str]) -> str:
    """What should be shown of a text, said in the simplest way: cut where the first stop that is completed starts."""
    for end in range(len(written) + 1):
        found = [stop for stop in stops if written[:end].endswith(stop)]
        if found:
            return written[: end - max(map(len, found))]
    return written


@settings(deadline=None, max_examples=150)
@given(
    written=st.text(alphabet=ALPHABET, max_size=25),
    stops=st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=4), max_size=1),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    cut=st.integers(0, 3),
)
def test_however_the_tokens_come(text: Text, written: str, stops: list[str], sizes: list[int], cut: int) -> None:
    """Emoji, CJK, stops across tokens, an end inside a character: one text, no U+FFFD, nothing of a stop."""
    token_ids = text.encode(written, add_special_tokens=False)
    token_ids = token_ids[: max(len(token_ids) - cut, 0)]
    if not token_ids:
        return
    made = output(text, stops)
    pieces = run(made, token_ids, "length", sizes)
    raw = b"".join(map(text.token_bytes, token_ids))
    assert "".join(piece.text for piece in pieces) == simple(raw.decode("utf-8", "ignore"), stops)
    whole = output(text, stops)
    run(whole, token_ids, "length", [len(token_ids)])
    assert (made.tokens, made.finish) == (whole.tokens, whole.finish)


@settings(deadline=None, max_examples=60)
@given(
    written=st.text(alphabet=ALPHABET, min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_every_token_is_told_once_and_in_order(text: Text, written: str, sizes: list[int]) -> None:
    token_ids = text.encode(written, add_special_tokens=False)
    pieces = run(output(text, ["zz"]), token_ids, "length", sizes, scored=True)
    told = [each for piece in pieces for each in piece.tokens]
    assert [each.token.token_id for each in told] == token_ids
    offsets = [each.offset for each in told]
    assert offsets == sorted(offsets)
    before = [b"".join(map(text.token_bytes, token_ids[:n])) for n in range(len(token_ids))]
    assert offsets == [len(raw.decode("utf-8", "ignore")) for raw in before]


def test_tokens_go_with_their_text(text: Text) -> None:
    token_ids = text.encode("a\N{GRINNING FACE}", add_special_tokens=False)
    pieces = run(output(text, []), [*token_ids, EOS], "stop", [1], scored=True)
    assert [(piece.text, len(piece.tokens)) for piece in pieces if piece.text or piece.tokens] == [
        ("a", 1),
        ("\N{GRINNING FACE}", len(token_ids) - 1),
    ]  # the end-of-sequence token is none of the text


@pytest.mark.parametrize(("include", "shown"), [(False, "One t"), (True, "One two th")])
def test_nothing_of_a_hidden_stop_is_told(text: Text, include: bool, shown: str) -> None:
    token_ids = text.encode("One two three", add_special_tokens=False)
    pieces = run(output(text, ["wo th"], include=include), token_ids, "length", [1], scored=True)
    assert "".join(piece.text for piece in pieces) == shown
    told = [text.token_bytes(each.token.token_id) for piece in pieces for each in piece.tokens]
    assert len(b"".join(told)) >= len(shown)
    assert len(b"".join(told[:-1])) < len(shown)
