"""The tiny Llama, loaded by mlx-lm on the thread of the tests, for the parts that run without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline import checkpoint

if TYPE_CHECKING:
    from pipeline.engines.mlx.model import Model

Decode = Callable[[tuple[int, ...], int], list[int]]


@pytest.fixture(scope="session")
def llama(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


@pytest.fixture(scope="session")
def model(llama: Path) -> Model:
    pytest.importorskip("mlx.core", exc_type=ImportError)
    from pipeline.engines.mlx.model import load

    return load(llama, checkpoint.read_contract(llama), "float32")


@pytest.fixture(scope="session")
def computed(model: Model) -> Callable[[tuple[int, ...]], list[Any]]:
    """mlx-lm's own caches of all but the last token of a prompt."""
    import mlx.core as mx

    from pipeline.engines.mlx.lm import make_prompt_cache

    def compute(token_ids: tuple[int, ...]) -> list[Any]:
        caches = make_prompt_cache(model.module)
        if len(token_ids) > 1:
            model.module(mx.array([token_ids[:-1]]), cache=caches)
            mx.eval([(cache.keys, cache.values) for cache in caches])
        return list(caches)

    return compute


@pytest.fixture(scope="session")
def alone(model: Model, computed: Callable[[tuple[int, ...]], list[Any]]) -> Decode:
    """Greedy text by mlx-lm's own generator, one request at a time, the last prompt token apart from the rest."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    def decode(token_ids: tuple[int, ...], count: int) -> list[int]:
        steps = generate_step(
            mx.array([token_ids[-1]]), model.module, max_tokens=count, prompt_cache=computed(token_ids)
        )
        return [int(token) for token, _ in steps]

    return decode
