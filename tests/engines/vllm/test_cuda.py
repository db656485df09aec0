"""On a GPU: a copy sees what the engine queued before its fence, although the engine has gone on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.page import PageShape

SHAPE = PageShape(layers=24, kv_heads=2, head_dim=64)
BLOCKS = 40
LONG = 200_000_000  # clock cycles of a kernel that keeps the engine's stream busy: about 0.1 s


@pytest.fixture
def copier() -> Any:
    import torch

    from pipeline.engines.vllm.blocks import BlockPages
    from pipeline.engines.vllm.copier import Copier

    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    memory = [torch.zeros(BLOCKS, 64, 2, 128, dtype=torch.float16, device="cuda") for _ in range(SHAPE.layers)]
    return Copier(BlockPages([layer.transpose(1, 2) for layer in memory], SHAPE))


def test_an_export_waits_for_the_forward_and_for_nothing_behind_it(copier: Any) -> None:
    import torch

    torch.cuda._sleep(LONG)  # a forward that still runs when its step says that it is queued
    copier.pages.fill(2.0)
    fence = copier.fence()
    torch.cuda._sleep(20 * LONG)  # the next step
    behind = copier.fence()
    assert not fence.passed
    read = copier.read(list(range(1, 1 + copier.batch)), fence)
    assert not behind.passed, "the copy waited for the whole device"
    assert (read == 2.0).all()
    behind.wait()


def test_an_import_waits_for_the_blocks_former_owner(copier: Any) -> None:
    import torch

    from pipeline.engines.vllm.copier import Fence

    page = np.random.default_rng(0).standard_normal((2, *SHAPE.array)).astype(np.float16)
    host = copier.host(2)
    host.numpy()[...] = page
    assert host.is_pinned()
    torch.cuda._sleep(LONG)
    copier.pages.fill(3.0)
    copier.write([7, 5], host, copier.fence())
    read = copier.read([7, 5, 6], Fence())
    assert np.array_equal(read[:2], page)
    assert (read[2] == 3.0).all()


def test_pages_stay_right_under_many_threads(copier: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from pipeline.engines.vllm.copier import Fence

    def go(block: int) -> bool:
        page = np.random.default_rng(block).standard_normal((1, *SHAPE.array)).astype(np.float16)
        for _ in range(20):
            host = copier.host(1)
            host.numpy()[...] = page
            copier.write([block], host, Fence())
            if not np.array_equal(copier.read([block], Fence()), page):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(go, range(1, 33)))
