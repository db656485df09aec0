"""The sampler against the reference engine's, which computes the same in numpy and FP64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.engines.reference import sampler as oracle
from pipeline.engines.text import Text
from pipeline.request import Sampling

pytest.importorskip("mlx.core", exc_type=ImportError)

import mlx.core as mx

from pipeline.engines.mlx.sampler import Sampler, apply, draw, report

VOCAB = 500
LOGITS = np.random.default_rng(3).normal(0, 3, (40, VOCAB)).astype(np.float32)
SAMPLINGS = [
    Sampling(1, temperature=1.0),
    Sampling(1, temperature=0.7),
    Sampling(1, temperature=2.5, top_k=40),
    Sampling(1, temperature=1.0, top_p=0.9),
    Sampling(1, temperature=1.5, top_k=50, top_p=0.6),
    Sampling(1, temperature=1.0, top_k=1),
    Sampling(1, temperature=1.0, top_p=1e-9),
    Sampling(1, temperature=1.0, top_p=0.0),
    Sampling(1, temperature=1e-5),
    Sampling(1, temperature=0.0),
    Sampling(1, temperature=1.0, top_k=10 * VOCAB),
    Sampling(1, temperature=1.3, min_p=0.05),
    Sampling(1, temperature=2.0, min_p=0.1, top_k=20, top_p=0.8),
    Sampling(1, temperature=2.0, min_p=1.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("seed", [0, 12345, -1, 2**64 + 5])
def test_draws_what_the_reference_draws(sampling: Sampling, seed: int) -> None:
    sampler = Sampler(sampling, seed)
    rows = range(len(LOGITS))
    got = [sampler(mx.array(LOGITS[row : row + 1]), 100 + row).item() for row in rows]
    assert got == [oracle.sample(LOGITS[row], sampling, seed, 100 + row) for row in rows]


def test_filters_come_in_the_stated_order() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    # top_k first leaves 4/7 and 3/7; half the mass is then reached by the first alone. top_p first would keep two.
    only_best = Sampler(Sampling(1, temperature=1.0, top_k=2, top_p=0.5), 0)
    assert {only_best(mx.array(logits), at).item() for at in range(50)} == {0}
    # temperature first: at 10 the four are nearly equal, and 0.5 of the mass needs two or three.
    hot = Sampler(Sampling(1, temperature=10.0, top_p=0.5), 0)
    assert {hot(mx.array(logits), at).item() for at in range(50)} == {0, 1}


def test_frequencies_follow_the_softmax() -> None:
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    sampler = Sampler(Sampling(1, temperature=1.0), 9)
    logits = mx.array(np.log(probs)[None].astype(np.float32))
    drawn = np.array([sampler(logits, at).item() for at in range(4000)])
    assert np.abs(np.bincount(drawn, minlength=4) / 4000 - probs).max() < 0.03  # 4 standard deviations


def test_draw_gives_each_row_its_own_sampler_and_position() -> None:
    samplers = [Sampler(sampling, seed) for seed, sampling in enumerate(SAMPLINGS)]
    positions = range(7, 7 + len(samplers))
    rows = LOGITS[: len(samplers)]
    expected = [
        oracle.sample(row, sampling, seed, position)
        for seed, (row, sampling, position) in enumerate(zip(rows, SAMPLINGS, positions, strict=True))
    ]
    assert draw(samplers, positions, mx.array(rows)).tolist() == expected


def test_all_greedy_rows_take_the_first_of_the_best() -> None:
    logits = mx.array([[1.0, 3.0, 3.0], [5.0, 5.0, 2.0]])
    greedy = [Sampler(Sampling(1, temperature=0.0), 0)] * 2
    assert draw(greedy, [0, 0], logits).tolist() == [1, 0]


def test_half_precision_logits_are_filtered_in_single() -> None:
    logits = mx.zeros((1, 40000), mx.float16)  # the sum of 40000 equal masses overflows what FP16 can count
    sampler = Sampler(Sampling(1, temperature=1.0), 1)
    assert len({sampler(logits, at).item() for at in range(20)}) == 20


CHANGES = [
    {"logit_bias": ((3, 4.0), (7, -100.0))},
    {"presence_penalty": 0.7, "frequency_penalty": -0.3},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": 1.0, "logit_bias": ((11, 2.0), (3, 1.0))},
    {"min_tokens": 9, "stop_token_ids": (1, 2, 499)},
]


@pytest.mark.parametrize("asked", CHANGES, ids=str)
def test_changes_are_the_references(asked: dict[str, Any]) -> None:
    text = Text((3, 5, 9), Sampling(9, **asked), VOCAB, limit=9, seed=0)
    for token in (11, 3, 11, 400):
        text.push(token)
    change = text.change()
    assert change is not None
    for allowed in (None, np.arange(VOCAB) % 3 == 0):
        masked = replace(change, allowed=allowed)
        for row in LOGITS[:5]:
            given = mx.array(row[None])
            np.testing.assert_allclose(np.array(apply(masked, given))[0], masked.apply(row), rtol=1e-6)
            assert np.array_equal(np.array(given)[0], row), "the model's logits were changed"


def test_changed_and_plain_rows_are_drawn_side_by_side() -> None:
    text = Text((1,), Sampling(9, temperature=0.0, logit_bias=((7, 1000.0),)), VOCAB, limit=9, seed=0)
    greedy = Sampler(Sampling(1, temperature=0.0), 0)
    drawn = draw([greedy, greedy], [0, 0], mx.array(LOGITS[:2]), [None, text.change()])
    assert drawn.tolist() == [int(LOGITS[0].argmax()), 7]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_reports_are_the_references(count: int) -> None:
    for row in LOGITS[:5]:
        token = int(row.argsort()[-3])
        (expected,) = oracle.report(row, token, count) or ()
        got = report(mx.array(row[None]), mx.array([token]), count).read(token)
        assert got.token_id == token
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [one for one, _ in got.top] == [one for one, _ in expected.top]
        assert [value for _, value in got.top] == pytest.approx([value for _, value in expected.top], abs=1e-5)
