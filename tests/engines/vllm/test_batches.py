"""Export and import in batches, as on CUDA: what one step completed leaves together, what came is written together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.errors import EngineError
from pipeline.page import Page, PageShape, page_tokens
from pipeline.request import Request, Sampling
from tests.engines.flow import Waiter, eventually
from tests.engines.vllm.test_copier import Event

SHAPE = PageShape(layers=1, kv_heads=1, head_dim=8)
TOKENS = 64 * 6 + 10  # 7 pages, the last with 9 rows: the last prompt token does not travel
BLOCKS = [10, 11, 12, 13, 14, 15, 16]


class FakeCopier:
    """Blocks hold their own number; calls are recorded."""

    batch = 3

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.pool: dict[int, Any] = {}

    def read(self, blocks: list[int], after: Any) -> Any:
        after.wait()
        self.calls.append(list(blocks))
        return np.stack([np.full(SHAPE.array, block, np.float16) for block in blocks])

    def host(self, pages: int) -> Any:
        import torch

        return torch.zeros((pages, *SHAPE.array), dtype=torch.float16)

    def write(self, blocks: list[int], host: Any, after: Any) -> None:
        after.wait()
        self.calls.append(list(blocks))
        self.pool |= {block: page.clone() for block, page in zip(blocks, host, strict=True)}


@pytest.fixture
def copier() -> FakeCopier:
    return FakeCopier()


@pytest.fixture
def exchange(copier: FakeCopier) -> Any:
    from pipeline.engines.vllm.exchange import Exchange

    made = Exchange()
    made.copier = copier  # type: ignore[assignment]
    return made


def order() -> Request:
    return Request("h", tuple(range(TOKENS)), Sampling(max_tokens=1))


@pytest.fixture
def export(exchange: Any) -> Any:
    from pipeline.engines.vllm.export import Export

    return Export("p", order(), exchange)


@pytest.fixture
def intake(exchange: Any) -> Any:
    from pipeline.engines.vllm.intake import Intake

    return Intake("d", order(), exchange, [], local=False)


def passed() -> Any:
    from pipeline.engines.vllm.copier import Fence

    return Fence()


def block_of(page: Page) -> int:
    return int(page.data[0, 0, 0, 0, 0])


def test_pages_of_one_step_leave_together_up_to_the_batch(export: Any, copier: FakeCopier) -> None:
    export.publish(2, BLOCKS, passed())
    export.publish(7, BLOCKS, passed(), done=True)
    pages = [export.read(index) for index in range(7)]
    assert copier.calls == [[10, 11], [12, 13, 14], [15, 16]]
    assert [block_of(page) for page in pages] == BLOCKS
    assert [page.tokens for page in pages] == [64] * 6 + [9]
    assert not pages[-1].data[:, :, :, 9:].any()
    assert export.released
    with pytest.raises(EngineError, match="read or skipped"):
        export.read(3)


def test_a_page_does_not_wait_for_a_later_step(export: Any, copier: FakeCopier) -> None:
    from pipeline.engines.vllm.copier import Fence

    running = Event()
    export.publish(2, BLOCKS, passed())
    export.publish(7, BLOCKS, Fence(running), done=True)
    assert block_of(export.read(1)) == 11
    assert not export.done
    reading = Waiter(lambda: export.read(2))
    assert eventually(lambda: export._copying == 1)
    assert not export.released
    running.passed.set()
    reading.join()
    assert block_of(reading.value) == 12  # type: ignore[arg-type]
    assert export.done
    assert export.wait_done(0)


def test_skipped_pages_are_not_kept(export: Any, copier: FakeCopier) -> None:
    export.publish(7, BLOCKS, passed())
    export.read(0)
    assert export._unread.copied == [1, 2]
    export.skip_to(2)
    assert export._unread.copied == [2]
    export.skip_to(5)
    assert not export._unread.copied
    assert block_of(export.read(5)) == 15


def test_a_preemption_forgets_pages_taken_along(export: Any, copier: FakeCopier) -> None:
    export.publish(3, BLOCKS, passed())
    export.read(0)
    export.withdraw()
    assert not export.wait_ready(1, 0)
    export.publish(2, [20, 21], passed())
    assert block_of(export.read(1)) == 21


def test_imports_are_written_batch_by_batch_and_the_rest_with_the_last_page(intake: Any, copier: FakeCopier) -> None:
    intake.admit(2, BLOCKS, passed())
    for index in range(2, 7):
        with pytest.raises(EngineError, match="was not imported"):
            intake.decode()
        tokens = page_tokens(index, TOKENS - 1)
        intake.import_page(Page(index, tokens, np.full(SHAPE.array, index, np.float16)))
    assert copier.calls == [[12, 13, 14], [15, 16]]
    assert {block: float(page.max()) for block, page in copier.pool.items()} == {12: 2, 13: 3, 14: 4, 15: 5, 16: 6}
    assert all(float(page.min()) == float(page.max()) for page in copier.pool.values())


def test_closing_waits_for_a_running_write(intake: Any, copier: FakeCopier) -> None:
    from pipeline.engines.vllm.copier import Fence

    running = Event()
    intake.keep_pages()  # for a capture: vLLM may have the blocks once they were read
    intake.admit(6, BLOCKS, Fence(running))
    importing = Waiter(lambda: intake.import_page(Page(6, 9, SHAPE.empty())))
    assert eventually(lambda: intake._copying == 1)
    closing = Waiter(intake.close)
    assert eventually(lambda: intake.closed)
    assert not intake.released
    assert copier.calls == []
    running.passed.set()
    importing.join()
    assert copier.calls == [[16]]
    assert intake.released
    intake.vanish()
    closing.join()
