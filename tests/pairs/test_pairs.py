"""Every ordered pair of engines, the same engine on both sides included, at every boundary length.

`make pairs` runs the three checkpoint families; a plain test run takes the first, so that each engine and role is
started once. Text is compared with the decode engine's own, token margins permitting (see tests/scenarios/oracle.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.scenarios import oracle
from tests.scenarios.oracle import MAX_TOKENS, Expected, prompts
from tests.scenarios.system import System

FAMILIES = ("llama", "qwen2", "qwen3") if os.environ.get("CROSSFILL_PAIRS") == "all" else ("llama",)
ENGINES = ("vllm", "sglang", "mlx", "reference")
PAIRS = [f"{p}->{d}" for p in ENGINES for d in ENGINES]
ENOUGH = 0.3  # of all tokens: margins of random weights are small
LONGEST = 200  # 744 tokens of a tiny random model say nothing that 193 do not
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="session")
def asked(tokenizer: Tokenizer) -> dict[int, list[int]]:
    return {length: ids for length, ids in prompts(tokenizer).items() if length <= LONGEST}


@pytest.fixture(scope="session")
def own_texts(
    fleet: System, model: Path, tokenizer: Tokenizer, asked: dict[int, list[int]]
) -> dict[str, dict[int, Expected]]:
    """engine -> length -> what it says without us."""
    return oracle.own_texts(ENGINES, model, tokenizer, asked)


@pytest.mark.parametrize("pair", PAIRS)
def test_text_equals_the_decode_engines_own(
    fleet: System, asked: dict[int, list[int]], own_texts: dict[str, dict[int, Expected]], pair: str
) -> None:
    decoder = pair.partition("->")[2]
    compared = 0
    for length, prompt in asked.items():
        answer = fleet.complete(prompt, pair, max_tokens=MAX_TOKENS)
        compared += own_texts[decoder][length].check(answer.text)
        moved = length if decoder == "sglang" else length - 1
        assert (answer.trace["imported_tokens"], answer.trace["reused_tokens"]) == (moved, 0)
        assert answer.usage["completion_tokens"] == MAX_TOKENS
    assert compared >= ENOUGH * MAX_TOKENS * len(asked)


@pytest.mark.parametrize("pair", PAIRS)
def test_held_pages_do_not_move(fleet: System, asked: dict[int, list[int]], pair: str) -> None:
    decoder = pair.partition("->")[2]
    salt = f"held-{pair}"
    first = fleet.complete(asked[193], pair, cache_salt=salt)
    again = fleet.complete(asked[193], pair, cache_salt=salt)
    assert again.text == first.text
    assert again.trace["reused_tokens"] == 192
    assert again.trace["imported_tokens"] == (1 if decoder == "sglang" else 0)


def test_nothing_is_left(fleet: System) -> None:
    fleet.settled()
