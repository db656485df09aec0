"""Relay: what one request is told, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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


def _into(poured: list[Event], *, goes_on: bool) -> Callable[[Event], bool]:
    def sink(event: Event) -> bool:
        poured.append(event)
        return goes_on

    return sink


async def test_while_next_is_waited_for_events_are_poured_and_the_last_is_returned(model: Served) -> None:
    relay, poured = Relay(FakeBackend(), model, [], Wish()), list[Event]()
    relay.pour(_into(poured, goes_on=True))
    relay._put(Event(0, "nobody waits yet"))
    assert await relay.next() == [Event(0, "nobody waits yet")]
    waiting = asyncio.create_task(relay.next())
    await asyncio.sleep(0)
    relay._put(Event(0, "a"))
    relay._put(Event(1, "b"))
    assert poured == [Event(0, "a"), Event(1, "b")]
    assert not waiting.done()
    relay._put(Event(0, "c", "stop"))
    relay._put(Event(1, "d"))  # not past the one that waits
    assert await waiting == [Event(0, "c", "stop"), Event(1, "d")]
    assert len(poured) == 2


async def test_a_sink_that_has_enough_wakes_the_waiter_and_gets_no_more(model: Served) -> None:
    relay, poured = Relay(FakeBackend(), model, [], Wish()), list[Event]()
    relay.pour(_into(poured, goes_on=False))
    waiting = asyncio.create_task(relay.next())
    await asyncio.sleep(0)
    relay._put(Event(0, "a"))
    relay._put(Event(0, "b"))
    assert await waiting == [Event(0, "b")]
    assert poured == [Event(0, "a")]


async def test_what_a_sink_raises_is_raised_from_next(model: Served) -> None:
    def broken(_: Event) -> bool:
        raise EngineError("no text of this")

    relay = Relay(FakeBackend(), model, [], Wish())
    relay.pour(broken)
    waiting = asyncio.create_task(relay.next())
    await asyncio.sleep(0)
    relay._put(Event(0, "a"))
    with pytest.raises(EngineError, match="no text of this"):
        await waiting


async def test_a_silence_counts_from_what_was_poured_last(model: Served) -> None:
    relay, clock = Relay(FakeBackend(), model, [], Wish()), asyncio.get_running_loop()
    relay.pour(lambda event: True)
    waiting = asyncio.create_task(relay.next(0.05))
    await asyncio.sleep(0)
    relay._put(Event(0, "a"))
    relay._told_s = clock.time() + 3600  # as if that were now
    relay._ring(0.05)
    assert not waiting.done()
    relay._told_s = clock.time() - 3600
    relay._ring(0.05)
    assert await waiting == []
