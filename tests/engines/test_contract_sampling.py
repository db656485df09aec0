"""The contract suite, third part: what may be asked beside temperature, top-k and top-p, on every engine that has it.

The oracle is the reference model's logits and formulas written out here; greedy text is compared while the changed
logits leave a margin. An engine that lacks a feature says so, and is skipped for it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline import grammar
from pipeline.engines.base import Engine
from pipeline.errors import EngineError, InvalidParameterError
from pipeline.logprob import TokenLogprob
from pipeline.request import Request, Sampling
from tests.engines.flow import (
    EPSILON,
    PATIENCE_S,
    Oracle,
    Sample,
    compute_locally,
    deliver_samples,
    export,
    prompt,
    read_samples,
    request,
)

TOLERANCE = 0.03  # of a logprob: KV and logits of two engines differ in FP16
EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["good", "bad"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
SCHEMA = grammar.encode("json_schema", PERSON)


def require(engine: Engine, feature: str) -> None:
    if feature not in engine.capabilities.features:
        pytest.skip(f"{engine.name} does not offer {feature}")


def run(engine: Engine, twin: Engine, ids: tuple[int, ...], **asked: Any) -> list[Sample]:
    """The samples of one handoff from the reference engine; greedy unless asked otherwise."""
    order = request(ids, Sampling(**({"max_tokens": 8, "temperature": 0.0} | asked)), to=engine)
    return deliver_samples(engine, order, export(twin, order))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    shifted: NDArray[np.float64] = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
    return shifted


def changed(logits: NDArray[np.float32], ids: tuple[int, ...], said: list[int], asked: Sampling) -> NDArray[np.float64]:
    """Bias and penalties one id at a time, as their definitions read."""
    result = logits.astype(np.float64)
    for token, bias in asked.logit_bias:
        result[token] += bias
    for token in {*ids, *said}:
        factor = asked.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token, count in Counter(said).items():
        result[token] -= asked.presence_penalty + count * asked.frequency_penalty
    return result


def compare_greedy(oracle: Oracle, ids: tuple[int, ...], got: list[int], asked: Sampling) -> int:
    """How many of the tokens `got` were compared: up to the first that was too close to call and fell otherwise."""
    compared = 0
    for at, token in enumerate(got):
        logits = changed(oracle.logits((*ids, *got[:at])), ids, got[:at], asked)
        second, best = np.partition(logits, -2)[-2:]
        if best - second > EPSILON:
            assert token == int(logits.argmax()), f"token {at}"
            compared += 1
    return compared


# Logprobs


def check_logprobs(
    oracle: Oracle, ids: tuple[int, ...], said: list[int], logprobs: list[TokenLogprob], top: int
) -> None:
    assert [one.token_id for one in logprobs] == said
    for at, one in enumerate(logprobs):
        expected = log_softmax(oracle.logits((*ids, *said[:at])))
        assert one.logprob == pytest.approx(expected[one.token_id], abs=TOLERANCE)
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
        assert len({token for token, _ in one.top}) == len(one.top) == top
        for rank, (token, value) in enumerate(one.top):
            assert value == pytest.approx(expected[token], abs=TOLERANCE)
            assert value == pytest.approx(np.sort(expected)[-1 - rank], abs=TOLERANCE)


@pytest.mark.role("decode")
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_of_the_models_own_distribution(engine: Engine, twin: Engine, oracle: Oracle, top: int) -> None:
    require(engine, "logprobs")
    ids = oracle.sure_prompt(100)
    (sample,) = run(engine, twin, ids, logprobs=top)
    assert sample.ids == list(oracle.text(ids).tokens)
    check_logprobs(oracle, ids, sample.ids, sample.logprobs, top)


@pytest.mark.role("decode")
def test_logprobs_do_not_see_temperature_bias_or_penalties(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    require(engine, "logprobs")
    require(engine, "logit_bias")
    require(engine, "penalties")
    ids = oracle.sure_prompt(100)
    asked = {"temperature": 3.0, "seed": 4, "top_k": 20, "frequency_penalty": 1.0, "logit_bias": ((77, 3.0),)}
    (sample,) = run(engine, twin, ids, logprobs=3, **asked)
    assert sample.ids != list(oracle.text(ids).tokens)
    check_logprobs(oracle, ids, sample.ids, sample.logprobs, 3)


@pytest.mark.role("decode")
def test_nobody_asked_for_logprobs(engine: Engine, twin: Engine) -> None:
    (sample,) = run(engine, twin, prompt(70))
    assert sample.logprobs == []


# What moves the logits


@pytest.mark.role("decode")
@pytest.mark.parametrize("seed", [None, 5])
def test_a_bias_forces_and_forbids(engine: Engine, twin: Engine, oracle: Oracle, seed: int | None) -> None:
    require(engine, "logit_bias")
    ids = oracle.sure_prompt(100)
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": seed}
    (forced,) = run(engine, twin, ids, logit_bias=((77, 100.0),), **drawn)
    assert forced.ids == [77] * 8
    best = oracle.text(ids).tokens[0]
    (without,) = run(engine, twin, ids, logit_bias=((best, -100.0),), max_tokens=30, **drawn)
    assert best not in without.ids


@pytest.mark.role("decode")
@pytest.mark.parametrize(
    ("feature", "asked"),
    [
        ("logit_bias", {"logit_bias": ((77, 2.5), (300, 2.0), (301, -3.0))}),
        ("penalties", {"frequency_penalty": 1.5}),
        ("penalties", {"presence_penalty": 2.0}),
        ("penalties", {"presence_penalty": -2.0, "frequency_penalty": -0.5}),
        ("penalties", {"repetition_penalty": 1.7}),
        ("penalties", {"repetition_penalty": 0.6}),
        ("penalties", {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": ((77, 3.5),)}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_greedy_text_follows_the_formulas(
    engine: Engine, twin: Engine, oracle: Oracle, feature: str, asked: dict[str, Any]
) -> None:
    require(engine, feature)
    compared = 0
    plain = []
    for seed in range(3):
        ids = prompt(90, seed)
        (sample,) = run(engine, twin, ids, max_tokens=16, **asked)
        compared += compare_greedy(oracle, ids, sample.ids, Sampling(16, **asked))
        plain.append(sample.ids == list(oracle.text(ids, 16).tokens))
    assert compared >= 30  # of 48
    assert not all(plain), "the parameters changed nothing: this test shows nothing"


@pytest.mark.role("decode")
def test_a_penalty_shapes_seeded_draws_too(engine: Engine, twin: Engine) -> None:
    require(engine, "penalties")
    hot: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    (never_twice,) = run(engine, twin, prompt(80), frequency_penalty=100.0, **hot)
    assert len(set(never_twice.ids)) == 40


@pytest.mark.role("decode")
@pytest.mark.parametrize("seed", [None, 3])
def test_min_p_cuts_against_the_best(engine: Engine, twin: Engine, oracle: Oracle, seed: int | None) -> None:
    require(engine, "min_p")
    ids = oracle.sure_prompt(100)
    (sample,) = run(engine, twin, ids, min_p=0.999, temperature=0.5, seed=seed)
    assert sample.ids == list(oracle.text(ids).tokens)
    probs = np.exp(log_softmax(oracle.logits(ids) / 2.0))
    near = set(
        np.flatnonzero(probs >= 0.29 * probs.max()).tolist()
    )  # 0.3 was asked for; 0.01 for the engine's rounding
    drawn = {
        run(engine, twin, ids, min_p=0.3, temperature=2.0, seed=seed and seed + at, max_tokens=1)[0].ids[0]
        for at in range(12)
    }
    assert len(drawn) > 1
    assert drawn <= near


@pytest.mark.role("decode")
@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "seed": 8}, {"temperature": 1.0}], ids=str)
def test_no_stop_id_before_min_tokens(engine: Engine, twin: Engine, oracle: Oracle, drawn: dict[str, Any]) -> None:
    require(engine, "min_tokens")
    ids = oracle.sure_prompt(100)
    best = tuple(np.argsort(-oracle.logits(ids))[:400].tolist())  # many stops: most draws would be one of them
    (sample,) = run(engine, twin, ids, stop_token_ids=best, min_tokens=5, max_tokens=60, **drawn)
    assert not set(sample.ids[:5]) & set(best)
    assert sample.finish == "stop"
    assert sample.ids[-1] in best


# Grammar


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def text_of(tokenizer: Tokenizer, sample: Sample) -> str:
    """Of a text that ended by itself, without its end."""
    assert sample.finish == "stop"
    assert sample.ids[-1] == EOS
    return str(tokenizer.decode(sample.ids[:-1], skip_special_tokens=False))


@pytest.mark.role("decode")
@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0}, {"temperature": 1.3, "seed": 1}], ids=str)
@pytest.mark.parametrize("stops", [(), (EOS,)])
def test_a_schema_is_kept(
    engine: Engine, twin: Engine, tokenizer: Tokenizer, drawn: dict[str, Any], stops: tuple[int, ...]
) -> None:
    require(engine, "grammar")
    for seed in range(2):
        (sample,) = run(
            engine, twin, prompt(70, seed), grammar=SCHEMA, max_tokens=200, stop_token_ids=stops, logprobs=None, **drawn
        )
        jsonschema.validate(json.loads(text_of(tokenizer, sample)), PERSON)


@pytest.mark.role("decode")
@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (grammar.encode("regex", "[0-9]{4}-[0-9]{2}"), "[0-9]{4}-[0-9]{2}"),
        (grammar.encode("lark", 'start: "yes" | "no" | "per" "haps"'), "yes|no|perhaps"),
    ],
    ids=["regex", "lark"],
)
def test_other_grammars_are_kept(engine: Engine, twin: Engine, tokenizer: Tokenizer, text: str, pattern: str) -> None:
    require(engine, "grammar")
    said = []
    for seed in range(6):  # so hot that what the model prefers hardly counts
        (sample,) = run(engine, twin, prompt(70), grammar=text, max_tokens=40, temperature=50.0, seed=seed)
        said.append(text_of(tokenizer, sample))
    assert all(re.fullmatch(pattern, one) for one in said), said
    assert len(set(said)) > 1


@pytest.mark.role("decode")
def test_max_tokens_cuts_a_grammar_short(engine: Engine, twin: Engine, tokenizer: Tokenizer) -> None:
    require(engine, "grammar")
    (sample,) = run(engine, twin, prompt(70), grammar=SCHEMA, max_tokens=3)
    assert (len(sample.ids), sample.finish) == (3, "length")
    assert '{"name":'.startswith(tokenizer.decode(sample.ids)[:6])


@pytest.mark.role("decode")
def test_min_tokens_yields_to_the_grammar(engine: Engine, twin: Engine, tokenizer: Tokenizer) -> None:
    """Nothing but an end may follow a text that matches whole."""
    require(engine, "grammar")
    text = grammar.encode("regex", "ab")
    (sample,) = run(engine, twin, prompt(70), grammar=text, min_tokens=50, max_tokens=60, stop_token_ids=(EOS,))
    assert text_of(tokenizer, sample) == "ab"


@pytest.mark.role("decode")
def test_a_grammar_that_cannot_be_compiled_leaves_nothing(engine: Engine, twin: Engine) -> None:
    require(engine, "grammar")
    order = request(prompt(70), Sampling(8, grammar=grammar.encode("lark", "start: <|none|>")), to=engine)
    with pytest.raises(InvalidParameterError, match="cannot be enforced"):
        engine.admit(order)


@pytest.mark.role("decode")
def test_a_grammar_holds_beside_free_requests(
    engine: Engine, twin: Engine, oracle: Oracle, tokenizer: Tokenizer
) -> None:
    """One batch: a row that is masked and rows that are not."""
    require(engine, "grammar")
    require(engine, "n")
    ids = oracle.sure_prompt(100)
    free = request(ids, to=engine)
    admission = engine.admit(free)
    try:
        pages = export(twin, free)
        for page in pages[admission.held_pages :]:
            admission.import_page(page)
        steps = admission.decode(pages.first_tokens, pages.first_logprobs)
        samples = run(engine, twin, prompt(70), grammar=SCHEMA, max_tokens=200, temperature=1.0, n=2)
        assert [token for step in steps for token in step.token_ids] == list(oracle.text(ids).tokens)
    finally:
        admission.close()
    for sample in samples:
        jsonschema.validate(json.loads(text_of(tokenizer, sample)), PERSON)


def test_a_grammar_that_fails_in_its_text_ends_no_other(engine: Engine) -> None:
    """It compiles, and is too large to be followed: its own request fails, the neighbour in the batch goes on."""
    require(engine, "grammar")
    schema = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1200)}}
    large = Sampling(8, grammar=grammar.encode("json_schema", schema))
    with pytest.raises(EngineError, match="grammar cannot be followed"):  # alone, which also compiles it
        compute_locally(engine, request(prompt(70), large))
    free = engine.admit(request(prompt(50), Sampling(max_tokens=500, temperature=0.0)), local=True)
    try:
        steps = free.decode()
        next(steps)
        with pytest.raises(EngineError, match="grammar cannot be followed"):
            compute_locally(engine, request(prompt(70), large))
        assert [next(steps).finish for _ in range(3)] == [None] * 3
    finally:
        free.close()


# Several samples


@pytest.mark.role("decode")
@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 100, 130])
def test_samples_differ_and_can_be_repeated(engine: Engine, twin: Engine, tokens: int) -> None:
    require(engine, "n")
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 40, "max_tokens": 12}
    run(engine, twin, prompt(tokens), n=4, **asked)  # so that both that follow have the same pages held
    first = run(engine, twin, prompt(tokens), n=4, **asked)
    again = run(engine, twin, prompt(tokens), n=4, **asked)
    assert first == again
    assert len({tuple(sample.ids) for sample in first}) == 4
    assert [(len(sample.ids), sample.finish) for sample in first] == [(12, "length")] * 4


@pytest.mark.role("decode")
def test_unseeded_samples_differ(engine: Engine, twin: Engine) -> None:
    require(engine, "n")
    samples = run(engine, twin, prompt(100), n=6, temperature=1.0)
    assert len({tuple(sample.ids) for sample in samples}) == 6


@pytest.mark.role("decode")
def test_greedy_samples_are_the_greedy_text(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    require(engine, "n")
    require(engine, "logprobs")
    ids = oracle.sure_prompt(130)
    for sample in run(engine, twin, ids, n=3, logprobs=2):
        assert sample.ids == list(oracle.text(ids).tokens)
        check_logprobs(oracle, ids, sample.ids, sample.logprobs, 2)


@pytest.mark.role("decode")
def test_samples_end_each_for_itself(engine: Engine, twin: Engine) -> None:
    require(engine, "n")
    stops = tuple(range(300, 450))  # about one draw in seven
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "stop_token_ids": stops}
    samples = run(engine, twin, prompt(100), n=6, **asked)
    assert len({len(sample.ids) for sample in samples}) > 2
    for sample in samples:
        assert not set(sample.ids[:-1]) & set(stops)
        assert sample.finish == ("stop" if sample.ids[-1] in stops else "length")
        assert sample.finish == "stop" or len(sample.ids) == 12


@pytest.mark.role("decode")
def test_closing_in_the_middle_ends_all_samples(engine: Engine, twin: Engine) -> None:
    require(engine, "n")
    order = request(prompt(100), Sampling(300, temperature=1.0, n=4), to=engine)
    admission = engine.admit(order)
    pages = export(twin, order)
    for page in pages[admission.held_pages :]:
        admission.import_page(page)
    steps = admission.decode(pages.first_tokens, pages.first_logprobs)
    seen: set[int] = set()
    while len(seen) < 4:
        seen.add(next(steps).sample)
    admission.close()  # the fixture then waits for the gauges to be back


def test_local_samples(engine: Engine, oracle: Oracle) -> None:
    require(engine, "n")
    ids = oracle.sure_prompt(100)
    order = request(ids, Sampling(8, temperature=0.0, n=3))
    admission = engine.admit(order, local=True, timeout_s=PATIENCE_S)
    try:
        samples = read_samples(admission.decode(), order.sampling)
    finally:
        admission.close()
    assert [tuple(sample.ids) for sample in samples] == [oracle.text(ids).tokens] * 3


# What P draws


def first(engine: Engine, ids: tuple[int, ...], **asked: Any) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
    sampling = Sampling(**({"max_tokens": 8, "temperature": 0.0} | asked))
    pages = export(engine, Request(request(ids).handoff_id, ids, sampling, first_token=True))
    return pages.first_tokens, pages.first_logprobs


@pytest.mark.role("prefill")
def test_p_draws_as_asked(engine: Engine, oracle: Oracle, tokenizer: Tokenizer) -> None:
    ids = oracle.sure_prompt(100)
    best = oracle.text(ids).tokens[0]
    if "logit_bias" in engine.capabilities.features:
        assert first(engine, ids, logit_bias=((77, 100.0),))[0] == (77,)
    if "penalties" in engine.capabilities.features:
        asked = Sampling(1, repetition_penalty=1.9)
        again = (*ids[:-1], best)  # the best token is one of the prompt's
        assert compare_greedy(oracle, again, list(first(engine, again, repetition_penalty=1.9)[0]), asked) <= 1
    if "min_tokens" in engine.capabilities.features:
        assert first(engine, ids, stop_token_ids=(best,), min_tokens=1)[0] != (best,)
    if "grammar" in engine.capabilities.features:
        assert tokenizer.decode(first(engine, ids, grammar=SCHEMA)[0])[0] == "{"


@pytest.mark.role("prefill")
def test_p_tells_the_logprobs_of_its_tokens(engine: Engine, oracle: Oracle) -> None:
    require(engine, "logprobs")
    ids = oracle.sure_prompt(100)
    tokens, logprobs = first(engine, ids, logprobs=4)
    assert tokens == oracle.text(ids).tokens[:1]
    check_logprobs(oracle, ids, list(tokens), list(logprobs), 4)


@pytest.mark.role("prefill")
def test_p_draws_a_token_for_each_sample(engine: Engine) -> None:
    require(engine, "n")
    asked: dict[str, Any] = {"temperature": 3.0, "seed": 7}
    first(engine, prompt(100))  # so that all that follow have the same pages held
    tokens, _ = first(engine, prompt(100), n=8, **asked)
    assert len(tokens) == 8
    assert len(set(tokens)) > 4
    assert first(engine, prompt(100), n=8, **asked)[0] == tokens
    singles = [first(engine, prompt(100), temperature=3.0, seed=7 + at)[0][0] for at in range(8)]
    assert list(tokens) == singles
