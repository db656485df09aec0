"""The seeded draw."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.request import Sampling
from tests.engines.flow import compute_locally, deliver, export, prompt, request
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

    from pipeline.engines.vllm.sampling import draw

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
