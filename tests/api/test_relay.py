"""Relay: what one request is told, and in which order."""

from __future__ import annotations

import pytest

from pipeline.api.relay import Event, Relay
from pipeline.api.served import Served
from pipeline.errors import EngineError
from pipeline.routing import Wish
from tests.api.fake import FakeBackend

pytestmark = pytest.mark.anyio


async def test_once_a_handoff_has_failed_nothing_of_its_siblings_is_told(model: Served) -> None:
    relay = Relay(FakeBackend(), model, [], Wish())
    relay._put(Event(0, "a"))
    relay._put(EngineError("boom"))
    relay._put(Event(1, "b"))
    assert await relay.next() == [Event(0, "a")]
    relay._put(Event(1, "c"))
    for _ in range(2):
        with pytest.raises(EngineError, match="boom"):
            await relay.next()
