"""Text over P/D equals what the decode engine says by itself, at every boundary length, in every direction.

Policy is `fail` and an engine counter shows that D computed one prompt token each: a decoder that quietly
recomputed, or ignored the pages, would be noticed (see also the planted page in test_wrong_pages.py).
"""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from tests.scenarios import oracle
from tests.scenarios.conftest import MODEL
from tests.scenarios.oracle import LENGTHS, MAX_TOKENS, Expected, prompts
from tests.scenarios.system import System, eventually

pytestmark = [pytest.mark.processes, pytest.mark.real_model, pytest.mark.timeout(600)]
DIRECTIONS = ["vllm->mlx", "mlx->vllm", "reference->mlx", "reference->vllm", "vllm->reference", "mlx->reference"]
ENOUGH = 0.6  # of all tokens must have been comparable


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def asked(tokenizer: Tokenizer) -> dict[int, list[int]]:
    return prompts(tokenizer)


@pytest.fixture(scope="module")
def own_texts(real: System, tokenizer: Tokenizer, asked: dict[int, list[int]]) -> dict[str, dict[int, Expected]]:
    """engine -> length -> what it says without us."""
    return oracle.own_texts(("vllm", "mlx", "reference"), MODEL, tokenizer, asked)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_text_equals_the_decode_engines_own(
    real: System, asked: dict[int, list[int]], own_texts: dict[str, dict[int, Expected]], direction: str
) -> None:
    decoder = direction.partition("->")[2]
    real.settled()
    before = real.stats(f"{decoder}-0")["prompt_tokens_computed"]
    compared = 0
    for length, prompt in asked.items():
        answer = real.complete(prompt, direction, max_tokens=MAX_TOKENS)
        compared += own_texts[decoder][length].check(answer.text)
        trace = answer.trace
        assert (trace["imported_tokens"], trace["reused_tokens"]) == (length - 1, 0)
        assert trace["pages"] == -(-(length - 1) // 64)
        assert answer.usage["completion_tokens"] == MAX_TOKENS
    assert compared >= ENOUGH * MAX_TOKENS * len(LENGTHS)
    real.settled()
    eventually(lambda: real.stats(f"{decoder}-0")["prompt_tokens_computed"] - before == len(LENGTHS))
