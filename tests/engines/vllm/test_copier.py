"""Many pages at once, out of and into both layouts of blocks, by one code path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.page import PAGE_TOKENS, PageShape
from tests.engines.flow import Waiter

SHAPE = PageShape(layers=3, kv_heads=2, head_dim=8)
BLOCKS = 7


def canonical(seed: int = 0) -> Any:
    """Every block of a pool as a page: `(blocks, layers, 2, kv_heads, 64, head_dim)`."""
    return np.random.default_rng(seed).standard_normal((BLOCKS, *SHAPE.array)).astype(np.float16)


def layers_of(pages: Any, layout: str) -> list[Any]:
    """vLLM's tensors for a pool, written down from what its kernels do, element by element where it is odd."""
    import torch

    made = []
    for layer in range(SHAPE.layers):
        keys, values = (torch.from_numpy(np.ascontiguousarray(pages[:, layer, plane])) for plane in (0, 1))
        if layout == "cpu":  # K transposed [dim, 64], then V [64, dim], flat within a (block, head)
            flat = torch.cat([keys.transpose(2, 3).flatten(2), values.flatten(2)], dim=2)
            made.append(flat.view(BLOCKS, SHAPE.kv_heads, PAGE_TOKENS, 2 * SHAPE.head_dim))
        else:
            logical = torch.cat([keys, values], dim=-1)
            made.append(
                logical.contiguous() if layout == "HND" else logical.transpose(1, 2).contiguous().transpose(1, 2)
            )
    return made


@pytest.fixture(params=["cpu", "HND", "NHD"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from pipeline.engines.vllm import blocks

    if request.param != "cpu":
        monkeypatch.setattr(blocks, "split_cpu", blocks.split_cuda)  # CUDA's arrangement, in ordinary memory
    return str(request.param)


def copier_over(layers: list[Any]) -> Any:
    from pipeline.engines.vllm.blocks import BlockPages
    from pipeline.engines.vllm.copier import Copier

    return Copier(BlockPages(layers, SHAPE))


def test_blocks_are_read_in_the_order_asked_for(layout: str) -> None:
    from pipeline.engines.vllm.copier import Fence

    pool = canonical()
    copier = copier_over(layers_of(pool, layout))
    read = copier.read([5, 1, 6, 1], Fence())
    assert np.array_equal(read, pool[[5, 1, 6, 1]])
    assert read.flags.c_contiguous
    assert read.dtype == np.float16


def test_blocks_are_written_and_no_others(layout: str) -> None:
    import torch

    from pipeline.engines.vllm.copier import Fence

    pool, new = canonical(), canonical(1)[:3]
    layers = layers_of(pool, layout)
    copier = copier_over(layers)
    host = copier.host(3)
    host.numpy()[...] = new
    copier.write([4, 0, 2], host, Fence())
    pool[[4, 0, 2]] = new
    for got, wanted in zip(layers, layers_of(pool, layout), strict=True):
        assert torch.equal(got, wanted)


def test_what_was_read_is_a_copy(layout: str) -> None:
    from pipeline.engines.vllm.copier import Fence

    pool = canonical()
    copier = copier_over(layers_of(pool, layout))
    read = copier.read([3], Fence())
    copier.pages.fill(0.0)
    assert np.array_equal(read[0], pool[3])
    assert not copier.read(list(range(BLOCKS)), Fence()).any()


class Event:
    """A CUDA event that passes when told to."""

    def __init__(self) -> None:
        import threading

        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(60)


@pytest.mark.parametrize("way", ["read", "write"])
def test_nothing_moves_before_the_fence(way: str) -> None:
    from pipeline.engines.vllm.copier import Fence

    pool = canonical()
    copier = copier_over(layers_of(pool, "cpu"))
    event = Event()
    log: list[bool] = []
    fence = Fence(event)
    ids = copier._ids

    def noted(blocks: Any) -> Any:
        log.append(fence.passed)
        return ids(blocks)

    copier._ids = noted  # what every copy begins with
    host = copier.host(1)
    copying = Waiter(lambda: copier.read([2], fence) if way == "read" else copier.write([2], host, fence))
    assert not fence.passed
    assert log == []
    event.passed.set()
    copying.join()
    assert copying.error is None
    assert log == [True]


def test_on_a_cpu_every_fence_has_passed() -> None:
    fence = copier_over(layers_of(canonical(), "cpu")).fence()
    assert fence.passed
    fence.wait()
