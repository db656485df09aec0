"""On a GPU: runs of pages between SGLang's pool and the ring, in order with what the scheduler has queued."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pipeline.page import PageShape

pytest.importorskip("torch", reason="PyTorch is not in this environment")

import torch

from pipeline.engines.sglang.plugin.pool import Buffer, Pool
from pipeline.engines.sglang.ring import Ring, create

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SHAPE = PageShape(layers=24, kv_heads=2, head_dim=64)
BLOCKS = 40
LONG = 200_000_000  # clock cycles of a kernel that keeps the scheduler's stream busy: about 0.1 s


@pytest.fixture
def memory() -> list[Any]:
    """Keys of all layers, then values: `(tokens, kv_heads, head_dim)` each, as SGLang allocates them."""
    made = np.random.default_rng(7).standard_normal((2 * SHAPE.layers, BLOCKS * 64, 2, 64)).astype(np.float16)
    return [torch.from_numpy(one).cuda() for one in made]


@pytest.fixture
def ring() -> Iterator[Ring]:
    made, fd = create(SHAPE)
    os.close(fd)
    yield made
    torch.cuda.cudart().cudaHostUnregister(made.memory.ctypes.data)  # the next ring may lie at the same address


@pytest.fixture
def pool(memory: list[Any], ring: Ring) -> Any:
    size = memory[0].numel() * 2
    made = Pool([Buffer(one.data_ptr(), size, size // BLOCKS) for one in memory], SHAPE, 0)
    made.pin(ring.memory)
    return made


def canonical(memory: list[Any], block: int) -> Any:
    rows = [one[block * 64 : (block + 1) * 64].cpu().numpy().transpose(1, 0, 2) for one in memory]
    return np.stack([np.stack(rows[: SHAPE.layers]), np.stack(rows[SHAPE.layers :])], axis=1)


def test_a_run_goes_out_and_in(memory: list[Any], ring: Ring, pool: Any) -> None:
    blocks = [5, 39, 0, 17]
    pool.read(blocks, ring.runs[1][:4], pool.fence())
    assert all(np.array_equal(ring.runs[1][at], canonical(memory, block)) for at, block in enumerate(blocks))
    before = canonical(memory, 6)
    pool.write([7, 8, 9, 10], ring.runs[1][:4], pool.fence())
    assert all(np.array_equal(canonical(memory, 7 + at), canonical(memory, block)) for at, block in enumerate(blocks))
    assert np.array_equal(canonical(memory, 6), before)


def test_the_ring_is_pinned(ring: Ring, pool: Any) -> None:
    assert torch.from_numpy(ring.runs[0]).is_pinned()


def test_a_ring_that_cannot_be_pinned_harms_nothing_else(ring: Ring, pool: Any) -> None:
    pool.pin(ring.memory)  # a second time: CUDA refuses
    torch.cuda._sleep(1)  # raised that error as its own
    torch.cuda.synchronize()


def test_a_copy_waits_for_what_was_queued_and_for_nothing_behind_it(memory: list[Any], ring: Ring, pool: Any) -> None:
    run = ring.runs[0]
    torch.cuda._sleep(LONG)
    for one in memory:
        one.fill_(2.0)
    fence = pool.fence()
    torch.cuda._sleep(20 * LONG)  # the next step
    behind = pool.fence()
    assert not fence.query()
    pool.read(list(range(len(run))), run, fence)
    assert not behind.query(), "the copy waited for the whole device"
    assert (run == 2.0).all()
    behind.synchronize()
