"""The contract suite: an answer that another engine began goes on as it would have, whatever it depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from pipeline import grammar
from pipeline.engines.base import Engine
from pipeline.request import Request, Sampling, resumed
from tests.engines.flow import Sample, deliver_samples, export, prompt, request

EOS = 2
LIST = {"type": "array", "items": {"enum": ["good", "bad"]}, "minItems": 3, "maxItems": 5}


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def require(engine: Engine, *features: str) -> None:
    for feature in features:
        if feature not in engine.capabilities.features:
            pytest.skip(f"{engine.name} does not offer {feature}")


def run(engine: Engine, twin: Engine, order: Request) -> list[Sample]:
    return deliver_samples(engine, order, export(twin, order))


def ordered(engine: Engine, **asked: Any) -> Request:
    return request(prompt(70), Sampling(**({"max_tokens": 8, "temperature": 0.0} | asked)), to=engine)


def test_penalties_count_what_another_engine_said(engine: Engine, twin: Engine) -> None:
    """Bias lifts three tokens far above all others, and what each has been said decides between them: worked out by
    hand. Who counted the answer so far as prompt would begin at 7 again."""
    require(engine, "penalties", "logit_bias")
    bias = ((7, 6000.0), (9, 5820.0), (11, 5000.0))
    order = ordered(engine, frequency_penalty=100.0, presence_penalty=50.0, logit_bias=bias)
    scores, said = {7: 6000.0, 9: 5820.0, 11: 5000.0}, list[int]()
    for _ in range(8):
        best = max(scores, key=lambda token: scores[token])
        scores[best] -= 100.0 if best in said else 150.0
        said.append(best)
    assert said == [7, 7, 9, 7, 9, 7, 9, 7]
    (rest,) = run(engine, twin, resumed(order, [said[:3]]))
    assert rest.ids == said[3:]


@pytest.mark.parametrize("begun", ["[", '["good', '["good","bad","bad"'])
def test_a_grammar_goes_on_where_another_engine_stood(
    engine: Engine, twin: Engine, tokenizer: Tokenizer, begun: str
) -> None:
    require(engine, "grammar")
    said = tokenizer.encode(begun).ids
    order = ordered(
        engine,
        max_tokens=60,
        grammar=grammar.encode("json_schema", LIST),
        temperature=1.0,
        seed=3,
        stop_token_ids=(EOS,),
    )
    (rest,) = run(engine, twin, resumed(order, [said]))
    assert rest.finish == "stop"
    whole = json.loads(tokenizer.decode([*said, *rest.ids]))
    jsonschema.validate(whole, LIST)


def test_each_of_several_samples_goes_on_from_its_own_words(engine: Engine, twin: Engine) -> None:
    """What was said comes again, also what nobody would draw; then the draws are those of these seeds and places."""
    require(engine, "n", "min_p")
    # SGLang leaves draws without min_p to itself: from a seed as well, but other ones.
    order = ordered(engine, n=2, temperature=1.5, seed=7, min_p=0.001)
    whole = [sample.ids for sample in run(engine, twin, order)]
    again = run(engine, twin, resumed(order, [whole[0][:5], whole[1][:1]]))
    assert [sample.ids for sample in again] == whole
    assert [sample.finish for sample in again] == ["length", "length"]
    other = run(engine, twin, resumed(order, [[21, 22, 23], []]))
    assert other[0].ids[:3] == [21, 22, 23]
    assert other[1].ids == whole[1]


def test_a_sample_that_had_ended_ends_again(engine: Engine, twin: Engine) -> None:
    require(engine, "n")
    order = ordered(engine, n=2, temperature=1.5, seed=7, stop_token_ids=(EOS,))
    ended, other = run(engine, twin, resumed(order, [[21, EOS], [22]]))
    assert (ended.ids, ended.finish) == ([21, EOS], "stop")
    assert (other.ids[0], other.finish is not None) == (22, True)


@pytest.mark.role("prefill")
def test_p_draws_for_a_continued_answer_too(engine: Engine, tokenizer: Tokenizer) -> None:
    require(engine, "grammar", "n")
    asked = Sampling(8, temperature=0.0, grammar=grammar.encode("regex", "abc"))
    order = Request("h-continued", prompt(70), asked, first_token=True)
    (token,) = export(engine, resumed(order, [tokenizer.encode("ab").ids])).first_tokens
    assert tokenizer.decode([token]) == "c"
    several = Request("h-several", prompt(70), Sampling(8, temperature=0.0, n=2), first_token=True)
    assert export(engine, resumed(several, [[21, 5], [22]])).first_tokens == (21, 22)
