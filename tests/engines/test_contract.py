"""The contract suite, first part: what `engines/base.py` promises of pages, text, prefixes and sampling."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from pipeline.engines.base import Engine, EngineStats
from pipeline.errors import EngineError
from pipeline.page import PAGE_TOKENS, Page, page_count, page_tokens
from pipeline.request import Sampling
from tests.engines.flow import (
    PATIENCE_S,
    Oracle,
    Tally,
    Waiter,
    compute_locally,
    computed_on_decode,
    deliver,
    eventually,
    export,
    hand_over,
    prompt,
    request,
)

BOUNDARIES = (1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 192, 193)
LENGTHS = (*BOUNDARIES, 256, 257, 321)  # and where whole chunks end, before the last token and with it
TEXTS = 3  # prompts per length
LEAST_COMPARED = 8  # of 8 tokens x TEXTS


# Pages


@pytest.mark.role("prefill")
@pytest.mark.parametrize("tokens", LENGTHS)
def test_pages_are_canonical_and_near_the_reference(engine: Engine, twin: Engine, tokens: int) -> None:
    order = request(prompt(tokens))
    pages, expected = export(engine, order), export(twin, order)
    assert [(page.index, page.tokens) for page in pages] == [
        (index, page_tokens(index, tokens - 1)) for index in range(page_count(tokens - 1))
    ]
    for page, wanted in zip(pages, expected, strict=True):
        assert page.data.shape == engine.contract.page_shape.array
        assert page.data.dtype == np.dtype("<f2")
        assert np.isfinite(page.data).all()
        assert not page.data[..., page.tokens :, :].any(), "the padding is not zero"
        assert relative_rms(page, wanted) <= 5e-3


def relative_rms(page: Page, wanted: Page) -> float:
    ours, theirs = page.data.astype(np.float64), wanted.data.astype(np.float64)
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))


@pytest.mark.role("prefill")
def test_read_gives_a_fresh_array(engine: Engine) -> None:
    order = request(prompt(200))
    pages = export(engine, order)
    kept = [page.data.copy() for page in pages[:3]]
    for page in pages:
        page.data[...] = 1
    again = export(engine, order)  # three full pages come out of the prefix cache
    assert all(np.array_equal(page.data, data) for page, data in zip(again, kept, strict=False))


@pytest.mark.role("prefill")
def test_pages_can_be_read_while_prefill_runs(engine: Engine) -> None:
    order = request(prompt(2500))
    running = engine.prefill(order)
    try:
        assert running.wait_ready(0, PATIENCE_S)
        first = running.read(0)
        assert not running.done, "2500 tokens in chunks of 64 cannot be done once the first page is"
        assert (first.index, first.tokens) == (0, PAGE_TOKENS)
        assert running.wait_ready(page_count(2499) - 1, PATIENCE_S)
        assert running.done
    finally:
        running.close()


@pytest.mark.role("prefill")
def test_skipped_pages_are_given_back(engine: Engine, baseline: EngineStats) -> None:
    order = request(prompt(300))
    running = engine.prefill(order)
    try:
        running.skip_to(3)
        assert running.read(3).tokens == PAGE_TOKENS
        assert running.read(4).tokens == 299 - 4 * PAGE_TOKENS
        assert eventually(lambda: engine.stats().held_pages == 0)
        assert eventually(lambda: engine.stats().free_pages == baseline.free_pages)
    finally:
        running.close()


@pytest.mark.role("prefill")
def test_everything_skipped(engine: Engine) -> None:
    assert export(engine, request(prompt(200)), first=page_count(199)) == []


# The whole prompt and a first token, for an engine that computes no prompt token


@pytest.mark.role("prefill")
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_whole_prompt_and_the_first_token(engine: Engine, twin: Engine, oracle: Oracle, tokens: int) -> None:
    ids = oracle.sure_prompt(tokens, 1)
    order = replace(request(ids), first_token=True)
    for _ in range(2):  # once computed, once with all that can be found in P's own prefix cache
        pages, expected = export(engine, order), export(twin, order)
        assert pages.first_tokens == oracle.text(ids, 1).tokens
        assert [page.tokens for page in pages] == [page_tokens(at, tokens) for at in range(page_count(tokens))]
        for page, wanted in zip(pages, expected, strict=True):
            assert relative_rms(page, wanted) <= 5e-3
            assert not page.data[..., page.tokens :, :].any(), "the padding is not zero"


@pytest.mark.role("prefill")
def test_the_first_token_comes_although_every_page_is_held_elsewhere(engine: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(128, 1)
    shipment = export(engine, replace(request(ids), first_token=True), first=2)
    assert (list(shipment), shipment.first_tokens) == ([], oracle.text(ids, 1).tokens)


@pytest.mark.role("prefill")
def test_the_first_token_is_drawn_as_the_request_says(engine: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(100)

    def draw(**changes: Any) -> int:
        sampling = replace(Sampling(max_tokens=8, temperature=2.0), **changes)
        return export(engine, replace(request(ids, sampling), first_token=True)).first_tokens[0]

    drawn = {seed: draw(seed=seed) for seed in range(6)}
    assert len(set(drawn.values())) > 1
    assert draw(seed=3) == drawn[3]
    best = oracle.text(ids, 1).tokens[0]
    assert draw(top_k=1) == draw(temperature=0.0) == draw(seed=5, top_p=1e-6) == best
    assert draw(temperature=0.0, stop_token_ids=(best,)) == best


# Text


@pytest.mark.parametrize("tokens", LENGTHS)
def test_handoff_to_itself(engine: Engine, oracle: Oracle, tokens: int) -> None:
    tally = Tally()
    for seed in range(TEXTS):
        order = request(prompt(tokens, seed))
        pages = export(engine, order)
        engine.reset_prefix_cache()
        before = engine.stats().prompt_tokens_computed
        ids, held, finish = deliver(engine, order, pages)
        assert (held, finish) == (0, "length")
        assert engine.stats().prompt_tokens_computed - before == 1
        tally.compare(ids, oracle.text(order.token_ids))
    assert tally.compared >= LEAST_COMPARED


@pytest.mark.role("prefill")
@pytest.mark.parametrize("tokens", LENGTHS)
def test_handoff_to_the_reference(engine: Engine, twin: Engine, oracle: Oracle, tokens: int) -> None:
    tally = Tally()
    for seed in range(TEXTS):
        order = request(prompt(tokens, seed))
        ids, held, finish = deliver(twin, order, export(engine, order))
        assert (held, finish) == (0, "length")
        tally.compare(ids, oracle.text(order.token_ids))
    assert tally.compared >= LEAST_COMPARED


@pytest.mark.role("decode")
@pytest.mark.parametrize("tokens", LENGTHS)
def test_handoff_from_the_reference(engine: Engine, twin: Engine, oracle: Oracle, tokens: int) -> None:
    tally = Tally()
    for seed in range(TEXTS):
        order = request(prompt(tokens, seed), to=engine)
        before = engine.stats().prompt_tokens_computed
        ids, held, finish = deliver(engine, order, export(twin, order))
        assert (held, finish) == (0, "length")
        assert engine.stats().prompt_tokens_computed - before == computed_on_decode(engine)
        tally.compare(ids, oracle.text(order.token_ids))
    assert tally.compared >= LEAST_COMPARED


@pytest.mark.parametrize("tokens", LENGTHS)
def test_local(engine: Engine, oracle: Oracle, tokens: int) -> None:
    tally = Tally()
    for seed in range(TEXTS):
        before = engine.stats().prompt_tokens_computed
        ids = compute_locally(engine, request(prompt(tokens, seed)))
        assert engine.stats().prompt_tokens_computed - before == tokens
        tally.compare(ids, oracle.text(prompt(tokens, seed)))
        engine.reset_prefix_cache()
    assert tally.compared >= LEAST_COMPARED


@pytest.mark.role("decode")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_wrong_page_changes_the_text(engine: Engine, twin: Engine, oracle: Oracle, index: int) -> None:
    ids = oracle.sure_prompt(180)
    order = request(ids, to=engine)
    pages, others = export(twin, order), export(twin, request(prompt(180, seed=77), to=engine))
    assert deliver(engine, order, pages)[0] == list(oracle.text(ids).tokens)
    engine.reset_prefix_cache()
    pages[index] = others[index]
    assert deliver(engine, order, pages)[0] != list(oracle.text(ids).tokens)


def test_many_at_once(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    prompts = [oracle.sure_prompt(tokens) for tokens in (3, 40, 64, 65, 66, 100, 128, 129, 150, 192, 200, 260)]
    incoming = [Waiter(partial(hand_over, twin, engine, ids)) for ids in prompts]
    outgoing = [Waiter(partial(hand_over, engine, twin, ids)) for ids in prompts]
    local = [Waiter(partial(compute_locally, engine, request(ids, salt="local"))) for ids in prompts]
    for waiter, ids in zip([*incoming, *outgoing, *local], prompts * 3, strict=True):
        waiter.join()
        assert waiter.error is None
        assert waiter.value == list(oracle.text(ids).tokens)


# Prefix hits


@pytest.mark.role("decode")
def test_the_same_prompt_again_is_held(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(130)
    order = request(ids, to=engine)
    pages = export(twin, order)
    assert deliver(engine, order, pages)[1] == 0
    before = engine.stats().prompt_tokens_computed
    text, held, _ = deliver(engine, order, pages)
    assert held == 2
    assert text == list(oracle.text(ids).tokens)
    assert engine.stats().prompt_tokens_computed - before == computed_on_decode(engine)


@pytest.mark.role("decode")
def test_a_shared_prefix_is_held(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(250)
    other = oracle.sure_prompt(260, shared=ids[:150])
    hand_over(twin, engine, ids)
    order = request(other, to=engine)
    text, held, _ = deliver(engine, order, export(twin, order))
    assert held == 2
    assert text == list(oracle.text(other).tokens)


@pytest.mark.role("decode")
def test_nothing_is_held_across_salts_or_after_a_reset(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(200)
    pages = export(twin, request(ids, to=engine))
    deliver(engine, request(ids, salt="a", to=engine), pages)
    assert deliver(engine, request(ids, salt="b", to=engine), pages)[1] == 0
    assert deliver(engine, request(ids, salt="a", to=engine), pages)[1] == 3
    engine.reset_prefix_cache()
    assert engine.stats().cached_pages == 0
    assert deliver(engine, request(ids, salt="a", to=engine), pages)[1] == 0


@pytest.mark.role("prefill")
def test_prefill_reuses_what_it_computed(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(200)
    export(engine, request(ids))
    before = engine.stats().prompt_tokens_computed
    text, _, _ = deliver(twin, request(ids), export(engine, request(ids)))
    assert text == list(oracle.text(ids).tokens)
    # 3 of 3 full pages; engines that run the last prompt token on P too compute 8 instead of 7.
    assert engine.stats().prompt_tokens_computed - before in (7, 8)


def test_a_local_request_uses_what_is_held(engine: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(200)
    compute_locally(engine, request(ids))
    before = engine.stats().prompt_tokens_computed
    assert compute_locally(engine, request(ids)) == list(oracle.text(ids).tokens)
    assert engine.stats().prompt_tokens_computed - before == 200 - 3 * PAGE_TOKENS


# Sampling and limits


def test_sampled_text_is_a_function_of_its_seed(engine: Engine) -> None:
    def draw(seed: int) -> list[int]:
        return compute_locally(engine, request(prompt(100), Sampling(max_tokens=16, temperature=1.0, seed=seed)))

    compute_locally(engine, request(prompt(100)))  # so that all that follow have the same pages held
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_unseeded_texts_differ(engine: Engine) -> None:
    free = Sampling(max_tokens=16, temperature=1.0)
    texts = {tuple(compute_locally(engine, request(prompt(100), free))) for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_a_narrow_filter_is_greedy(engine: Engine, oracle: Oracle, narrow: dict[str, float]) -> None:
    ids = oracle.sure_prompt(100)
    sampling = Sampling(max_tokens=8, seed=3, **narrow)  # type: ignore[arg-type]
    assert compute_locally(engine, request(ids, sampling)) == list(oracle.text(ids).tokens)


def test_top_k_bounds_the_choice(engine: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(100)
    best = set(np.argsort(-oracle.logits(ids))[:8].tolist())  # 4 are allowed; a near tie may swap neighbours
    hot = [Sampling(max_tokens=1, temperature=5.0, top_k=4, seed=seed) for seed in range(12)]
    drawn = [compute_locally(engine, request(ids, sampling))[0] for sampling in hot]
    assert set(drawn) <= best
    assert 1 < len(set(drawn)) <= 4


@pytest.mark.role("decode")
def test_a_stop_id_is_emitted_and_ends_the_text(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(100)
    expected = list(oracle.text(ids).tokens)
    stop = expected[3]
    ends = expected.index(stop) + 1
    sampling = Sampling(max_tokens=8, temperature=0.0, stop_token_ids=(5, stop))
    order = request(ids, sampling, to=engine)
    text, _, finish = deliver(engine, order, export(twin, order))
    assert (text, finish) == (expected[:ends], "stop")


@pytest.mark.role("decode")
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_tokens(engine: Engine, twin: Engine, oracle: Oracle, limit: int) -> None:
    ids = oracle.sure_prompt(100)
    sampling = Sampling(max_tokens=limit, temperature=0.0)
    order = request(ids, sampling, to=engine)
    text, _, finish = deliver(engine, order, export(twin, order))
    assert (text, finish) == (list(oracle.text(ids).tokens)[:limit], "length")


def test_tokens_sampled_counts(engine: Engine) -> None:
    before = engine.stats().tokens_sampled
    compute_locally(engine, request(prompt(70)))
    assert engine.stats().tokens_sampled - before == 8


# Import


@pytest.mark.role("decode")
def test_pages_must_come_in_order(engine: Engine, twin: Engine) -> None:
    order = request(prompt(200), to=engine)
    pages = export(twin, order)
    admission = engine.admit(order)
    try:
        with pytest.raises(EngineError):
            admission.import_page(pages[1])
    finally:
        admission.close()


@pytest.mark.role("decode")
def test_read_only_pages_can_be_imported(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(150)
    order = request(ids, to=engine)
    pages = export(twin, order)
    for at, page in enumerate(pages):
        pages[at] = replace(page, data=np.frombuffer(page.data.tobytes(), np.float16).reshape(page.data.shape))
    assert deliver(engine, order, pages)[0] == list(oracle.text(ids).tokens)
