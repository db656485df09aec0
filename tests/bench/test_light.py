"""Checkpoints that compute little: the size of their pages, and text from every token."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench import light
from pipeline import checkpoint
from pipeline.engines.reference import ReferenceEngine
from pipeline.request import Request, Sampling
from pipeline.sample import tiny
from pipeline.sample.tiny import Dims
from pipeline.settings import EngineSettings

SMOLLM2_PAGE = 30 * 2 * 3 * 64 * 64 * 2  # layers, K and V, heads, tokens, head dim, FP16


@pytest.mark.parametrize(("dims", "page_bytes"), [(light.WIDE, SMOLLM2_PAGE), (light.NARROW, SMOLLM2_PAGE // 6)])
def test_pages_have_the_stated_size(tmp_path: Path, dims: Dims, page_bytes: int) -> None:
    contract = checkpoint.read_contract(light.write(tmp_path / "m", dims))
    assert contract.page_shape.page_bytes == page_bytes


def test_what_is_text() -> None:
    tokenizer = tiny.tokenizer()
    (the,) = tokenizer.encode(" the").ids
    part = tokenizer.encode("\u4f60").ids[0]  # one of its three bytes
    assert [light.is_text(tokenizer, token) for token in (the, part, 0)] == [True, False, False]


def test_every_greedy_token_is_text(tmp_path: Path) -> None:
    model = light.write(tmp_path / "m", light.NARROW)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with closing(ReferenceEngine(model, EngineSettings())) as engine:
        tokens = _greedy(engine, list(range(3, 40)), 24)
    assert len(tokens) == 24
    assert all(light.is_text(tokenizer, token) for token in tokens)


def _greedy(engine: ReferenceEngine, prompt: list[int], count: int) -> list[int]:
    request = Request("f" * 32, tuple(prompt), Sampling(max_tokens=count, temperature=0.0))
    with closing(engine.admit(request, local=True, timeout_s=60)) as admission:
        return [token for step in admission.decode() for token in step.token_ids]
