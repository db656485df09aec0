"""A stream's events leave in the call that tells of them, in order, however slow the client is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from pipeline.api.answer import Answer, Hose, until_gone
from pipeline.api.relay import Event
from pipeline.errors import PeerError

pytestmark = pytest.mark.anyio


class Client:
    """An ASGI `send` that waits, while told to, before it takes a message."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.got: list[bytes] = []

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0) if message["body"] == b"yield" else None
        if not self.open.is_set():
            await self.open.wait()
        self.got.append(message["body"])


def _hose(client: Client) -> Hose:
    return Hose(lambda event: event.text.encode(), client.send)


async def test_what_a_ready_client_gets_it_has_when_take_returns() -> None:
    client = Client()
    hose = _hose(client)
    assert [hose.take(Event(0, text)) for text in ("a", "", "b")] == [True, True, True]
    assert client.got == [b"a", b"b"]
    assert not await hose.flush()


async def test_a_send_that_pauses_is_ended_by_flush() -> None:
    client = Client()
    hose = _hose(client)
    client.open.clear()
    assert not hose.take(Event(0, "a"))
    assert client.got == []
    flushing = asyncio.create_task(hose.flush())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not flushing.done()
    client.open.set()
    assert await flushing
    assert client.got == [b"a"]
    assert not await hose.flush()


async def test_a_pause_that_is_over_before_it_is_flushed() -> None:
    client = Client()
    hose = _hose(client)
    client.open.clear()
    assert not hose.take(Event(0, "a"))
    client.open.set()
    await asyncio.sleep(0)
    assert await hose.flush()
    assert not hose.take(Event(0, "yield"))  # a bare turn of the loop is a pause as well
    assert await hose.flush()
    assert client.got == [b"a", b"yield"]


async def test_a_flush_that_is_cancelled_cancels_the_send() -> None:
    client = Client()
    hose = _hose(client)
    client.open.clear()
    assert not hose.take(Event(0, "a"))
    flushing = asyncio.create_task(hose.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    client.open.set()
    await asyncio.sleep(0)
    assert client.got == []


async def test_what_a_send_raises_comes_out_of_whoever_drives_it() -> None:
    async def broken(message: Message) -> None:
        await asyncio.sleep(0) if message["body"] == b"later" else None
        raise OSError("gone")

    hose = Hose(lambda event: event.text.encode(), broken)
    with pytest.raises(OSError, match="gone"):
        hose.take(Event(0, "now"))
    assert not hose.take(Event(0, "later"))
    with pytest.raises(OSError, match="gone"):
        await hose.flush()


async def test_a_cancel_from_outside_is_no_client_that_is_gone() -> None:
    never = asyncio.Event()

    async def receive() -> Message:
        await never.wait()
        raise AssertionError

    waiting = asyncio.create_task(until_gone(receive, never.wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_was_poured_before_a_failure_reaches_a_slow_client() -> None:
    client = Client()
    hose = _hose(client)

    async def fails(_: object) -> list[Event]:
        client.open.clear()
        hose.take(Event(0, "said before"))
        client.open.set()
        raise PeerError("gone")

    relay: Any = SimpleNamespace(next=fails)
    telling: Any = SimpleNamespace(teller=None, pace=SimpleNamespace(keep_alive_s=None))
    with pytest.raises(PeerError):
        await Answer(relay, telling)._heard(hose)
    assert client.got == [b"said before"]
