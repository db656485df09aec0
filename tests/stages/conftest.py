"""Stands for the stages' tests. One kind of server is enough here: `tests/broker` runs the scripts on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from redis import Redis

from pipeline.settings import HandoffSettings
from tests.stages.stand import LIMITS, Stand

Build = Callable[..., Stand]


@pytest.fixture
def build(redis_client: Redis, server_url: str) -> Iterator[Build]:
    """Make a stand whose workers have the deadlines given: `p_limits`, `d_limits`, and the ledger's policy."""
    with ExitStack() as stack:

        def make(p_limits: HandoffSettings = LIMITS, d_limits: HandoffSettings = LIMITS) -> Stand:
            return stack.enter_context(Stand(server_url, p_limits, d_limits))

        yield make


@pytest.fixture
def stand(build: Build) -> Stand:
    return build()
