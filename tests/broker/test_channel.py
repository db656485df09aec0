"""Tokens arrive once, in order, whatever the subscriber misses."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from pipeline.broker import keys
from pipeline.broker.channel import ErrorInfo, TokenEntry, TokenHub, TokenReader, decode
from pipeline.errors import BrokerError
from pipeline.logprob import TokenLogprob

ENTRIES = [TokenEntry(i, (i,)) for i in range(50)] + [TokenEntry(50, (9,), finish="stop", held_tokens=3)]


def _append(client: Redis, handoff_id: str, entry: TokenEntry, publish: bool = True) -> None:
    names = keys.HandoffKeys(handoff_id)
    index = int(client.rpush(names.tokens, entry.encode())) - 1
    if publish:
        client.publish(names.notify, f"{index} {entry.encode()}")


async def _read(url: str, handoff_id: str, write: Callable[[], None]) -> list[TokenEntry]:
    client = AsyncRedis.from_url(url)
    hub = TokenHub(client)
    await hub.start()
    try:
        async with TokenReader(hub, handoff_id) as reader:
            task = asyncio.create_task(asyncio.to_thread(write))
            got = [entry async for entry in reader]
            await task
            return got
    finally:
        await hub.close()
        await client.aclose()


def test_encoding_round_trips() -> None:
    entry = TokenEntry(3, (1, 2), error=ErrorInfo("c", "m", True, 503), held_tokens=None)
    assert decode(entry.encode()) == entry
    logprobs = (TokenLogprob(1, -0.25, ((4, -0.125), (1, -0.25))), TokenLogprob(2, -3.5, ((2, -3.5), (9, -4.0))))
    entry = TokenEntry(3, (1, 2), finish="stop", sample=2, logprobs=logprobs, more=True)
    assert decode(entry.encode()) == entry


def test_what_was_not_asked_for_costs_no_bytes() -> None:
    assert TokenEntry(3, (1, 2)).encode() == '{"seq":3,"token_ids":[1,2]}'
    assert TokenEntry(3, (1,), logprobs=(TokenLogprob(1, -0.25, ((4, -0.125),)),)).encode() == (
        '{"seq":3,"token_ids":[1],"logprobs":[[1,-0.25,4,-0.125]]}'
    )


@pytest.mark.parametrize(
    ("entry", "last"),
    [
        (TokenEntry(0, (1,)), False),
        (TokenEntry(0, (1,), finish="stop"), True),
        (TokenEntry(0, (1,), finish="stop", sample=1, more=True), False),
        (TokenEntry(0, (), error=ErrorInfo("c", "m", True, 503)), True),
    ],
)
def test_which_entry_is_the_last(entry: TokenEntry, last: bool) -> None:
    assert entry.last is last


@pytest.mark.parametrize("published", [lambda i: True, lambda i: i % 3 == 0, lambda i: False])
def test_reader_gets_every_entry_once(redis_client: Redis, server_url: str, published: Callable[[int], bool]) -> None:
    handoff_id = secrets.token_hex(16)

    def write() -> None:
        for i, entry in enumerate(ENTRIES):
            _append(redis_client, handoff_id, entry, publish=published(i))

    assert asyncio.run(_read(server_url, handoff_id, write)) == ENTRIES


def test_duplicates_and_late_messages_are_dropped(redis_client: Redis, server_url: str) -> None:
    handoff_id = secrets.token_hex(16)
    names = keys.HandoffKeys(handoff_id)

    def write() -> None:
        for entry in ENTRIES:
            _append(redis_client, handoff_id, entry)
            redis_client.publish(names.notify, f"0 {ENTRIES[0].encode()}")

    assert asyncio.run(_read(server_url, handoff_id, write)) == ENTRIES


def test_subscriber_connection_killed_mid_stream(redis_client: Redis, server_url: str) -> None:
    handoff_id = secrets.token_hex(16)

    def write() -> None:
        for i, entry in enumerate(ENTRIES):
            if i == 20:
                redis_client.client_kill_filter(_type="pubsub")
            _append(redis_client, handoff_id, entry)

    assert asyncio.run(_read(server_url, handoff_id, write)) == ENTRIES


def test_two_readers_share_one_hub(redis_client: Redis, server_url: str) -> None:
    ids = [secrets.token_hex(16) for _ in range(2)]

    async def both() -> list[list[TokenEntry]]:
        client = AsyncRedis.from_url(server_url)
        hub = TokenHub(client)
        await hub.start()

        async def one(handoff_id: str) -> list[TokenEntry]:
            async with TokenReader(hub, handoff_id) as reader:
                for entry in ENTRIES:
                    _append(redis_client, handoff_id, entry)
                return [entry async for entry in reader]

        try:
            return list(await asyncio.gather(*map(one, ids)))
        finally:
            await hub.close()
            await client.aclose()

    assert asyncio.run(both()) == [ENTRIES, ENTRIES]


class _Swallowing:
    """A pub/sub connection that, like `asyncio.wait_for` before Python 3.12, may swallow a cancellation."""

    async def subscribe(self, channel: str) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)

    unsubscribe = subscribe


def test_a_cancelled_open_ends_although_the_client_library_swallows_it(server_url: str) -> None:
    async def run() -> None:
        client = AsyncRedis.from_url(server_url)
        hub = TokenHub(client)
        hub._pubsub = _Swallowing()  # type: ignore[assignment]
        task = asyncio.create_task(hub.open("0" * 32))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert hub._inboxes == {}
        await client.aclose()

    asyncio.run(run())


def test_a_handoff_the_broker_has_lost_is_an_error_not_silence(redis_client: Redis, server_url: str) -> None:
    handoff_id = secrets.token_hex(16)
    redis_client.hset(keys.HandoffKeys(handoff_id).record, "state", "decoding")

    def write() -> None:
        _append(redis_client, handoff_id, ENTRIES[0])
        redis_client.flushall()

    with pytest.raises(BrokerError, match="lost this request"):
        asyncio.run(_read(server_url, handoff_id, write))
