"""The layout of vLLM's blocks."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import ConfigError, EngineError
from pipeline.page import PAGE_TOKENS, Page, PageShape
from tests.engines.flow import deliver, export, prompt, request
from tests.engines.vllm.conftest import SHAPE, scribble, shared_engine


@shared_engine
def test_the_block_layout_is_verified(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.engines.vllm import blocks

    device = engine._exchange.copier.pages.device.type
    for shape in (SHAPE, PageShape(2, 2, 32), PageShape(30, 3, 64), PageShape(1, 2, 128)):
        blocks.verify_layout(shape, device)
    name = f"split_{device}"
    right = getattr(blocks, name)

    def swapped(layer: Any) -> list[Any]:
        """K taken for V."""
        return [
            blocks.KvView(slice(1 - plane, 2 - plane), view[:, at : at + 1])
            for planes, view in right(layer)
            for at, plane in enumerate(range(planes.start, planes.stop))
        ]

    monkeypatch.setattr(blocks, name, swapped)
    with pytest.raises(ConfigError, match="lays out KV blocks"):
        blocks.verify_layout(SHAPE, device)


@shared_engine
def test_cuda_views_are_right_for_both_stride_orders(engine: Any) -> None:
    import torch

    from pipeline.engines.vllm.blocks import split_cuda

    canonical = torch.randn(3, 2, 2, PAGE_TOKENS, 8).half()  # (blocks, K|V, heads, tokens, dim)
    logical = torch.cat([canonical[:, 0], canonical[:, 1]], dim=-1)
    in_memory = {"HND": logical.contiguous(), "NHD": logical.transpose(1, 2).contiguous().transpose(1, 2)}
    assert in_memory["HND"].stride() != in_memory["NHD"].stride()
    for layer in in_memory.values():
        (one,) = split_cuda(layer)
        assert one.planes == slice(0, 2)
        assert torch.equal(one.view, canonical)


@shared_engine
def test_tensors_of_another_shape_are_refused(engine: Any) -> None:
    import torch

    from pipeline.engines.vllm.blocks import BlockPages

    right = torch.zeros(2, 2, PAGE_TOKENS, 128, dtype=torch.float16)
    BlockPages([right] * 4, SHAPE)
    with pytest.raises(ConfigError, match="3 layers"):
        BlockPages([right] * 3, SHAPE)
    with pytest.raises(ConfigError, match="bfloat16"):
        BlockPages([right.bfloat16()] * 4, SHAPE)
    with pytest.raises(ConfigError, match="KV blocks are"):
        BlockPages([right[:, :, :32]] * 4, SHAPE)


@shared_engine
def test_a_tail_is_written_whole(engine: Any) -> None:
    order = request(prompt(200))
    pages = export(engine, order)
    scribble(engine)
    expected = deliver(engine, order, pages)
    scribble(engine, float("nan"))  # NaN in a row behind the tail would ruin the text
    assert deliver(engine, order, pages) == expected
    scribble(engine, 0.0)


@shared_engine
def test_a_page_with_nan_is_not_let_in(engine: Any) -> None:
    order = request(prompt(200))
    pages = export(engine, order)
    engine.reset_prefix_cache()
    spoiled = pages[0].data.copy()
    spoiled[1, 0, 1, 63, 5] = float("nan")
    admission = engine.admit(order)
    with pytest.raises(EngineError, match="NaN"):
        admission.import_page(Page(0, PAGE_TOKENS, spoiled))
    admission.close()
