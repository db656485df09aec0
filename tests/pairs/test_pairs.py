"""Every ordered pair of engines, the same engine on both sides included, at every boundary length.

`make pairs` runs the three checkpoint families; a plain run takes the first, so that each engine and role is started
once. The oracle is the reference model, computed here without any engine, page or process: prompts are chosen so that
each of its greedy tokens leads by more than KV of two engines can differ, so every engine must say exactly that.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.engines.reference.model import Model
from pipeline.engines.reference.oracle import split_prefill, split_run
from pipeline.request import Sampling
from tests.engines.flow import EPSILON, Oracle
from tests.engines.flow import prompt as random_prompt
from tests.engines.test_contract_sampling import TOLERANCE, changed, log_softmax
from tests.scenarios.system import System

FAMILIES = ("llama", "qwen2", "qwen3") if os.environ.get("CROSSFILL_PAIRS") == "all" else ("llama",)
ENGINES = ("vllm", "sglang", "mlx", "reference")
PAIRS = [f"{p}->{d}" for p in ENGINES for d in ENGINES]
LENGTHS = (1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 192, 193, 744)
TOKENS = 8
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]


class Asked(NamedTuple):
    prompt: list[int]
    text: str


@pytest.fixture(scope="session")
def asked(model: Path) -> dict[int, Asked]:
    """By length: a prompt and what must be said behind it."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    oracle = Oracle(Model.load(model))

    def ends_between_characters(ids: tuple[int, ...], said: tuple[int, ...]) -> bool:
        """Else a character that prompt and answer share would be part of neither, or of both."""
        parts = [tokenizer.decode(ids), tokenizer.decode(said)]
        return "\ufffd" not in (parts[0][-1:], parts[1][:1], parts[1][-1:])

    prompts = {length: oracle.sure_prompt(length, TOKENS, suits=ends_between_characters) for length in LENGTHS}
    return {n: Asked(list(ids), tokenizer.decode(oracle.text(ids, TOKENS).tokens)) for n, ids in prompts.items()}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_text_is_right_and_each_token_moves_once(fleet: System, asked: dict[int, Asked], pair: str) -> None:
    whole = pair.endswith("sglang")  # it computes no prompt token; the others compute the last one themselves
    for length, (prompt, text) in asked.items():
        answer = fleet.complete(prompt, pair, max_tokens=TOKENS)
        assert answer.text == text, length
        moved = length if whole else length - 1
        assert (answer.trace["imported_tokens"], answer.trace["reused_tokens"]) == (moved, 0)
        assert answer.trace["pages"] == -(-moved // 64)
        assert answer.usage["completion_tokens"] == TOKENS


@pytest.mark.parametrize("pair", PAIRS)
def test_held_pages_do_not_move(fleet: System, asked: dict[int, Asked], pair: str) -> None:
    prompt, text = asked[193]
    for held in (False, True):
        answer = fleet.complete(prompt, pair, max_tokens=TOKENS, cache_salt=f"held-{pair}")
        assert answer.text == text
        assert answer.trace["reused_tokens"] == (192 if held else 0)
        assert answer.trace["imported_tokens"] == (192 if not held else 0) + pair.endswith("sglang")


# What a request may ask beside a temperature: both engines must have it where P draws D's first token.
SHAPED = ["vllm->sglang", "mlx->sglang", "sglang->sglang"]
SHAPE = Sampling(6, logit_bias=((77, 2.5), (300, -3.0)), presence_penalty=1.5, repetition_penalty=1.3)
ANSWER = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


class Shaped(NamedTuple):
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@pytest.fixture(scope="session")
def shaped(model: Path) -> Shaped:
    """What SHAPE makes of a prompt by the reference's logits, each token ahead by more than engines can differ."""
    reference = Model.load(model)
    for seed in range(100):
        prompt = random_prompt(130, seed)
        cache, raw = split_prefill(reference, prompt, SHAPE.max_tokens)
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < SHAPE.max_tokens:
            logits = changed(raw, prompt, tokens, SHAPE)
            second, best = np.partition(logits, -2)[-2:]
            if best - second <= EPSILON:
                break
            tokens.append(int(logits.argmax()))
            logprobs.append(float(log_softmax(raw)[tokens[-1]]))
            raw = reference.logits(tokens[-1:], cache)
        else:
            if tuple(tokens) != split_run(reference, prompt, SHAPE.max_tokens).tokens:
                return Shaped(prompt, tuple(tokens), tuple(logprobs))
    raise AssertionError("no prompt has sure tokens")


@pytest.mark.parametrize("pair", SHAPED)
def test_bias_penalties_and_logprobs(fleet: System, model: Path, shaped: Shaped, pair: str) -> None:
    """D counts the token that P drew, and both report what the model itself found."""
    body = {"logit_bias": {str(token): bias for token, bias in SHAPE.logit_bias}, "logprobs": 3}
    body |= {"presence_penalty": SHAPE.presence_penalty, "repetition_penalty": SHAPE.repetition_penalty}
    answer = fleet.post(shaped.prompt, pair, max_tokens=SHAPE.max_tokens, **body)
    (choice,) = answer.json()["choices"]
    assert choice["text"] == Tokenizer.from_file(str(model / "tokenizer.json")).decode(shaped.tokens)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(shaped.logprobs, abs=TOLERANCE)
    assert all(len(top) >= 3 for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize("pair", SHAPED)
def test_samples_keep_a_grammar_and_pages_move_once(fleet: System, asked: dict[int, Asked], pair: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    drawn = {"n": 3, "seed": 5, "temperature": 1.0}
    said = []
    for _ in range(2):
        forced = {"max_tokens": 60, "ignore_eos": False, "response_format": schema}
        answer = fleet.post(asked[193].prompt, pair, **drawn, **forced).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
        said.append([choice["text"] for choice in answer["choices"]])
        for text in said[-1]:
            jsonschema.validate(json.loads(text), ANSWER)
        assert answer["crossfill"]["imported_tokens"] == 192 + pair.endswith("sglang")
    assert said[0] == said[1]
    free = fleet.post(asked[193].prompt, pair, **drawn).json()["choices"]
    assert len({choice["text"] for choice in free}) == 3


def test_nothing_is_left(fleet: System) -> None:
    fleet.settled()
