"""Stop strings: whatever way a text is cut into pieces, the outcome is that of a character-by-character reader."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.stop import StopMatcher


def naive(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Reads one character more at a time; ends at the first prefix that holds a stop, at its earliest start."""
    for end in range(1, len(text) + 1):
        found = [(text[:end].index(stop), len(stop)) for stop in stops if stop in text[:end]]
        if found:
            at, length = min(found)
            return text[: at + length if include else at], True
    return text, False


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher, out = StopMatcher(stops, include=include), []
    for piece in pieces:
        out.append(matcher.feed(piece))
        if matcher.matched is not None:
            return out, matcher.matched
    return [*out, matcher.flush()], None


SMALL = st.text(alphabet="ab\N{GRINNING FACE}", max_size=24)


@settings(deadline=None)
@given(st.lists(SMALL, max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.booleans())
def test_one_stop_at_most_per_piece_equals_the_naive_reader(pieces: list[str], stops: list[str], include: bool) -> None:
    characters = [character for piece in pieces for character in piece]
    out, matched = run(characters, stops, include=include)
    assert ("".join(out), matched is not None) == naive("".join(pieces), stops, include)


@settings(deadline=None)
@given(st.lists(SMALL, max_size=8), st.text(alphabet="ab", min_size=1, max_size=4), st.booleans())
def test_any_split_gives_the_same_text(pieces: list[str], stop: str, include: bool) -> None:
    out, matched = run(pieces, [stop], include=include)
    assert ("".join(out), matched is not None) == naive("".join(pieces), [stop], include)


@settings(deadline=None)
@given(st.lists(SMALL, min_size=1, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_than_could_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher, sent, fed = StopMatcher(stops), "", ""
    for piece in pieces:
        sent, fed = sent + matcher.feed(piece), fed + piece
        if matcher.matched is not None:
            return
        held = fed[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(fed[at:] and stop.startswith(fed[at:]) for stop in stops for at in range(len(sent)))


def test_a_stop_over_three_pieces() -> None:
    assert run(["Hello <", "|e", "nd|> more"], ["<|end|>"]) == (["Hello ", "", ""], "<|end|>")
    assert run(["Hello <", "|e", "nx"], ["<|end|>"]) == (["Hello ", "", "<|enx", ""], None)
    assert run(["tail <|"], ["<|end|>"]) == (["tail ", "<|"], None)


def test_the_earliest_start_wins() -> None:
    assert run(["abcdef"], ["de", "bcd"]) == (["a"], "bcd")
    assert run(["abcdef"], ["bcd", "bc"]) == (["a"], "bc")
    assert run(["xSTOPy"], ["STOP"], include=True) == (["xSTOP"], "STOP")
