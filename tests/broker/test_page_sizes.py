"""Pages of every size that models have, 16 KiB to 8 MiB: whole, exact, and never more in flight than the budget."""

from __future__ import annotations

import threading
import uuid
from contextlib import closing

import numpy as np
import pytest
from redis import Redis

from pipeline import prefix
from pipeline.broker.connect import connect
from pipeline.broker.stream import PageReader, PageWriter, gauges, raise_fence, release
from pipeline.frame import Commit, FrameReader, FrameWriter
from pipeline.handoff import Attempts
from pipeline.page import PAGE_TOKENS, Page, PageShape
from pipeline.settings import BrokerSettings
from tests.broker.test_stream import START, no_check

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
ATTEMPTS = Attempts(1, 1)
SHAPES = [
    PageShape(layers=2, kv_heads=1, head_dim=32),  # 16 KiB
    PageShape(layers=24, kv_heads=2, head_dim=64),  # 768 KiB: Qwen2.5-0.5B
    PageShape(layers=32, kv_heads=8, head_dim=128),  # 8 MiB: Llama-3.1-8B
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.page_bytes >> 10}KiB")
def test_a_slow_decoder_bounds_what_is_in_flight(server_url: str, redis_client: Redis, shape: PageShape) -> None:
    """Six pages through a budget of two; the reader takes none until the writer stands still."""
    pages, handoff_id, size = 6, uuid.uuid4().hex, shape.page_bytes
    settings = BrokerSettings(url=server_url, budget_bytes=2 * size)
    prompt = range(pages * PAGE_TOKENS + 1)
    addresses = prefix.chain(START, prompt[:-1]), prefix.prompt_digest(START, prompt)
    rng = np.random.default_rng(size)
    data = [rng.standard_normal(shape.array).astype(np.float16) for _ in range(pages)]
    writer_frames = FrameWriter(handoff_id, ATTEMPTS, shape, *addresses)
    reader_frames = FrameReader(
        handoff_id, ATTEMPTS, shape, *addresses, first_page=0, transfer_tokens=pages * PAGE_TOKENS
    )

    def send() -> None:
        with connect(server_url) as client, closing(PageWriter(client, writer_frames, settings, no_check)) as writer:
            writer.open()
            for index, page in enumerate(data):
                writer.write(Page(index, PAGE_TOKENS, page))
            writer.commit()

    with connect(server_url) as client:
        raise_fence(client, handoff_id, ATTEMPTS, settings)
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        while gauges(redis_client) != (2 * size, 1, 1):  # the test's timeout bounds this
            pass
        peak = 0
        with closing(PageReader(client, reader_frames, settings, no_check)) as reader:
            for index in range(pages):
                page = reader.read(60)
                assert isinstance(page, Page)
                assert page.index == index
                np.testing.assert_array_equal(page.data, data[index])
                peak = max(peak, gauges(redis_client).in_flight_bytes)
                reader.imported()
            assert reader.read(60) == Commit(pages)
        sender.join(60)
        assert not sender.is_alive()
        assert peak == 2 * size
        release(client, handoff_id)
    assert gauges(redis_client) == (0, 0, 0)
    assert list(redis_client.scan_iter(f"*{handoff_id}*")) == []
