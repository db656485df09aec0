"""The seeded draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeline.engines.text import Text
from pipeline.errors import EngineError
from pipeline.logprob import TokenLogprob
from pipeline.request import Sampling
from tests.engines.flow import compute_locally, deliver, deliver_samples, export, prompt, request
from tests.engines.vllm.conftest import shared_engine


@shared_engine
def test_a_seeded_text_does_not_depend_on_chunks_or_on_where_the_prompt_came_from(engine: Any) -> None:
    order = request(prompt(300, seed=3), Sampling(max_tokens=12, temperature=0.7, top_p=0.9, top_k=40, seed=11))
    local = compute_locally(engine, order)  # three chunks: vLLM's own seed dies of that on a CPU
    engine.reset_prefix_cache()
    pages = export(engine, order)
    engine.reset_prefix_cache()
    assert deliver(engine, order, pages)[0] == local


@shared_engine
def test_a_seeded_text_goes_on_where_it_was_cut(engine: Any) -> None:
    whole = Sampling(max_tokens=12, temperature=1.0, seed=11)
    ids = prompt(90, seed=3)
    text = compute_locally(engine, request(ids, whole))
    rest = compute_locally(engine, request((*ids, *text[:5]), Sampling(max_tokens=7, temperature=1.0, seed=11)))
    assert rest == text[5:]


@shared_engine
def test_the_draw_follows_the_distribution(engine: Any) -> None:
    import torch

    from pipeline.engines.draw import draw

    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])
    count = 4000
    frequencies = np.zeros(5)
    for position in range(count):
        token = int(draw(logits, position=position, seed=-5, temperature=2.0, top_k=4, top_p=0.8).argmax())
        frequencies[token] += 1 / count
    kept = np.exp(np.array([2.0, 1.0, 0.0, 3.0]) / 2)  # top-k drops token 3
    kept /= kept.sum()
    kept[2] = 0  # top-p: 0.46 + 0.28 + 0.17 reach 0.8 without token 2
    expected = np.zeros(5)
    expected[[0, 1, 2, 4]] = kept / kept.sum()
    assert np.abs(frequencies - expected).max() < 0.03
    assert frequencies[2] == frequencies[3] == 0


def made(*said: int, **asked: Any) -> Text:
    text = Text((3, 5, 9), Sampling(9, **asked), 500, limit=9, seed=0)
    for token in said:
        text.push(token)
    return text


@shared_engine
@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": ((3, 4.0), (7, -100.0))},
        {"presence_penalty": 0.7, "frequency_penalty": -0.3},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "presence_penalty": 1.0, "logit_bias": ((11, 2.0), (3, 1.0))},
        {"min_tokens": 9, "stop_token_ids": (1, 2, 499)},
    ],
    ids=str,
)
def test_changes_are_the_references(engine: Any, asked: dict[str, Any]) -> None:
    import torch

    from pipeline.engines.draw import apply

    logits = np.random.default_rng(3).normal(0, 3, 500).astype(np.float32)
    change = made(11, 3, 11, 400, **asked).change()
    assert change is not None
    for allowed in (None, np.arange(500) % 3 == 0):
        masked = replace(change, allowed=allowed)
        given = torch.from_numpy(logits.copy())
        np.testing.assert_allclose(apply(masked, given).numpy(), masked.apply(logits), rtol=1e-6)
        assert np.array_equal(given.numpy(), logits), "the model's logits were changed"


@shared_engine
def test_the_drawn_logprob_counts_once(engine: Any) -> None:
    """vLLM gives one mapping per token: the drawn id, then the likeliest, of which it may be one."""
    from pipeline.engines.vllm.sampling import logprobs

    class Found(NamedTuple):
        logprob: float
        rank: int

    among = {7: Found(-1.0, 2), 4: Found(-0.5, 1)}
    beside = {9: Found(-6.0, 40), 4: Found(-0.5, 1), 7: Found(-1.0, 2)}
    assert logprobs([among, beside], [7, 9], 2) == (
        TokenLogprob(7, -1.0, ((4, -0.5), (7, -1.0))),
        TokenLogprob(9, -6.0, ((4, -0.5), (7, -1.0))),
    )
    assert logprobs([{9: Found(-6.0, 40)}], [9], 0) == (TokenLogprob(9, -6.0, ()),)


@shared_engine
def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(engine: Any, monkeypatch: Any) -> None:
    """vLLM's step must survive: an error out of it would end the engine."""

    def broken(text: Text) -> None:
        if text.changes:
            raise EngineError("no token may follow")

    monkeypatch.setattr(Text, "change", broken)
    with pytest.raises(EngineError, match="no token may follow"):
        compute_locally(engine, request(prompt(90), Sampling(8, presence_penalty=1.0)))
    assert len(compute_locally(engine, request(prompt(90)))) == 8
    assert engine.failure is None


@shared_engine
def test_samples_share_the_pages_of_the_prompt(engine: Any) -> None:
    """Two full pages and a tail of two tokens: each further sample computes the tail and nothing else."""
    asked = Sampling(8, temperature=1.0, seed=1, n=4)
    order = request(prompt(130), asked)
    pages = export(engine, order)
    engine.reset_prefix_cache()
    before = engine.stats().prompt_tokens_computed
    samples = deliver_samples(engine, order, pages)
    assert engine.stats().prompt_tokens_computed - before == 1 + 3 * 2
    assert len({tuple(sample.ids) for sample in samples}) == 4


@shared_engine
def test_more_samples_than_places(engine: Any) -> None:
    with pytest.raises(EngineError, match="max_running is 16"):
        engine.admit(request(prompt(90), Sampling(8, n=17)))
