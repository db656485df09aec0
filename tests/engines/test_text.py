"""Text against formulas worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline import grammar
from pipeline.engines.text import Change, Text, texts
from pipeline.errors import InvalidParameterError
from pipeline.grammar import Compiler
from pipeline.request import Request, Sampling
from pipeline.sample import tiny

LOGITS = np.array([1.0, -1.0, 2.0, -2.0, 0.5, 3.0], np.float32)
VOCAB = len(LOGITS)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    where = tmp_path_factory.mktemp("tokenizer")
    tiny.tokenizer().save(str(where / "tokenizer.json"))
    return Compiler(where, tiny.VOCAB, [2])


def text(*said: int, prompt: tuple[int, ...] = (0, 1), limit: int = 9, **asked: Any) -> Text:
    made = Text(prompt, Sampling(9, **asked), VOCAB, limit=limit, seed=0)
    for token in said:
        made.push(token)
    return made


def shaped(made: Text) -> list[float]:
    change = made.change()
    assert change is not None
    return [float(value) for value in change.apply(LOGITS)]


def test_nothing_asked_changes_nothing() -> None:
    made = text(3, temperature=0.3, top_k=2, top_p=0.5, min_p=0.1, logprobs=2, stop_token_ids=(1,))
    assert not made.changes
    assert made.change() is None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"logit_bias": ((0, 5.0), (5, -100.0))}, [6.0, -1.0, 2.0, -2.0, 0.5, -97.0]),
        ({"logit_bias": ((0, 5.0), (99, 1.0), (-1, 7.0))}, [6.0, -1.0, 2.0, -2.0, 0.5, 3.0]),  # not in the vocabulary
        ({"presence_penalty": 0.5}, [1.0, -1.0, 1.5, -2.5, 0.5, 3.0]),
        ({"frequency_penalty": 0.5}, [1.0, -1.0, 1.0, -2.5, 0.5, 3.0]),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, [1.0, -1.0, 2.5, -1.25, 0.5, 3.0]),
        ({"repetition_penalty": 2.0}, [0.5, -2.0, 1.0, -4.0, 0.5, 3.0]),  # prompt 0, 1 and samples 2, 3
        ({"repetition_penalty": 0.5}, [2.0, -0.5, 4.0, -1.0, 0.5, 3.0]),
        # Bias first, then repetition, then the others: (2 + 2) / 2 - 0.5 for token 2.
        (
            {"repetition_penalty": 2.0, "presence_penalty": 0.5, "logit_bias": ((2, 2.0),)},
            [0.5, -2.0, 1.5, -4.5, 0.5, 3.0],
        ),
    ],
    ids=str,
)
def test_the_formulas(asked: dict[str, Any], expected: list[float]) -> None:
    assert shaped(text(2, 3, 2, **asked)) == expected


def test_every_token_so_far_is_repeated_once() -> None:
    said = (4, 2, 4, 0, 3, 3)
    made = text(prompt=(1, 0, 1), repetition_penalty=2.0)
    for at in range(len(said) + 1):
        change = made.change()
        assert change is not None
        assert sorted(change.repeated.tolist()) == sorted({1, 0, *said[:at]})
        if at < len(said):
            made.push(said[at])


def test_the_logits_that_were_given_stay() -> None:
    shaped(text(2, presence_penalty=0.5))
    assert LOGITS.tolist() == [1.0, -1.0, 2.0, -2.0, 0.5, 3.0]


def test_stop_ids_are_forbidden_until_min_tokens() -> None:
    made = text(min_tokens=2, stop_token_ids=(5, 0, 99))
    for token in (3, 3):
        assert shaped(made) == [-np.inf, -1.0, 2.0, -2.0, 0.5, -np.inf]
        assert made.push(token) is None
    assert shaped(made) == LOGITS.tolist()


def test_only_what_the_grammar_allows_is_left(compiler: Compiler) -> None:
    ids = tiny.tokenizer().encode("ab").ids
    matcher = compiler.matcher(grammar.encode("regex", "ab"))
    made = Text((7,), Sampling(9, min_tokens=9), tiny.VOCAB, limit=9, seed=0, matcher=matcher)
    assert made.stops == {2}
    for token in ids:
        change = made.change()
        assert change is not None
        left = np.flatnonzero(np.isfinite(change.apply(np.zeros(tiny.VOCAB, np.float32))))
        assert token in left
        assert 2 not in left
        assert made.push(token) is None
    change = made.change()
    assert change is not None
    assert np.flatnonzero(np.isfinite(change.apply(np.zeros(tiny.VOCAB, np.float32)))).tolist() == [2]
    assert made.push(2) == "stop"


def test_how_a_text_ends() -> None:
    made = text(limit=3, stop_token_ids=(4,))
    assert made.position == 2
    assert [made.push(token) for token in (1, 2, 3)] == [None, None, "length"]
    assert made.position == 5
    assert text(limit=1, stop_token_ids=(4,)).push(4) == "stop"


def test_samples_have_seeds_and_matchers_of_their_own(compiler: Compiler) -> None:
    asked = Sampling(9, seed=40, n=3, grammar=grammar.encode("regex", "ab"))
    made = texts(Request("h", (7,), asked), tiny.VOCAB, compiler, lambda: 0, 9)
    assert [one.seed for one in made] == [40, 41, 42]
    made[0].push(tiny.tokenizer().encode("a").ids[0])
    assert isinstance(made[0].change(), Change)
    assert not np.array_equal(made[0].change().allowed, made[1].change().allowed)  # type: ignore[union-attr, arg-type]


def test_what_was_answered_before_counts_as_answer(compiler: Compiler) -> None:
    """Penalties and grammar see the answer, wherever it was drawn; limits are of what is still to be drawn."""
    whole = text(2, 3, 2, prompt=(0, 1), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    made = Text((0, 1, 2, 3, 2), whole.sampling, VOCAB, limit=2, seed=0, answered=3)
    assert shaped(made) == shaped(whole)
    assert made.position == whole.position == 5
    assert [made.push(4), made.push(4)] == [None, "length"]

    ids = tuple(tiny.tokenizer().encode("ab").ids)
    asked = Request("h", (7, *ids), Sampling(9, grammar=grammar.encode("regex", "abc")), answered=len(ids))
    (goes_on,) = texts(asked, tiny.VOCAB, compiler, lambda: 0, 9)
    change = goes_on.change()
    assert change is not None
    assert change.allowed is not None
    assert np.flatnonzero(change.allowed).tolist() == tiny.tokenizer().encode("c").ids


def test_what_is_said_again_is_forced_and_then_the_text_goes_on(compiler: Compiler) -> None:
    sampling = Sampling(9, n=2, presence_penalty=0.5, min_tokens=9, stop_token_ids=(3,), logit_bias=((5, 9.0),))
    first, second = texts(Request("h", (7,), sampling, again=((5, 3), ())), VOCAB, compiler, lambda: 0, 9)
    whole = [-np.inf] * VOCAB
    assert shaped(first) == [*whole[:5], 3.0]
    assert first.push(5) is None
    assert shaped(first) == [*whole[:3], -2.0, *whole[4:]]  # it was said: no matter what forbids it now
    assert first.push(3) == "stop"
    assert shaped(second) == [1.0, -1.0, 2.0, -np.inf, 0.5, 12.0]
    plain = Text((7,), Sampling(9), VOCAB, limit=9, seed=0, again=(5,))
    assert (plain.changes, shaped(plain)) == (True, [*whole[:5], 3.0])


def test_unseeded_samples_take_entropy(compiler: Compiler) -> None:
    fresh = iter([5, 6])
    made = texts(Request("h", (7,), Sampling(9, n=2)), tiny.VOCAB, compiler, lambda: next(fresh), 9)
    assert [one.seed for one in made] == [5, 6]


def test_a_grammar_that_cannot_be_compiled(compiler: Compiler) -> None:
    asked = Request("h", (7,), Sampling(9, grammar=grammar.encode("regex", "[")))
    with pytest.raises(InvalidParameterError, match="cannot be enforced"):
        texts(asked, tiny.VOCAB, compiler, lambda: 0, 9)
