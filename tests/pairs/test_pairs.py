"""Every ordered pair of engines, the same engine on both sides included, at every boundary length.

`make pairs` runs the three checkpoint families; a plain run takes the first, so that each engine and role is started
once. The oracle is the reference model, computed here without any engine, page or process: prompts are chosen so that
each of its greedy tokens leads by more than KV of two engines can differ, so every engine must say exactly that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer

from pipeline.engines.reference.model import Model
from tests.engines.flow import Oracle
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
    prompts = {length: oracle.sure_prompt(length, TOKENS) for length in LENGTHS}
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


def test_nothing_is_left(fleet: System) -> None:
    fleet.settled()
