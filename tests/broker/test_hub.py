"""Tokens arrive once, in order, whatever the subscriber misses."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as AwayError

from pipeline.broker import keys
from pipeline.broker.channel import TokenEntry
from pipeline.broker.connect import connect_async
from pipeline.broker.hub import Heard, TokenHub, TokenReader
from pipeline.broker.line import Line
from pipeline.broker.scripts import Step
from pipeline.errors import BrokerError, PeerError
from tests.ports import free_port
from tests.proxy import Faults, Proxy

ENTRIES = [TokenEntry(i, (i,)) for i in range(50)] + [TokenEntry(50, (9,), finish="stop", held_tokens=3)]


def _append(client: Redis, handoff_id: str, entry: TokenEntry, publish: bool = True) -> None:
    names = keys.HandoffKeys(handoff_id)
    index = int(client.rpush(names.tokens, entry.encode())) - 1
    if publish:
        client.publish(names.notify, f"{index} {entry.encode()}")


async def _read(url: str, handoff_id: str, write: Callable[[], None]) -> list[Heard]:
    async with _opened(url) as hub, _reading(hub, handoff_id) as reader:
        rest = _rest(reader)
        await asyncio.to_thread(write)
        return await rest


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

    async def both() -> list[list[Heard]]:
        async with _opened(server_url) as hub:

            async def one(handoff_id: str) -> list[Heard]:
                async with _reading(hub, handoff_id) as reader:
                    for entry in ENTRIES:
                        _append(redis_client, handoff_id, entry)
                    return await _rest(reader)

            return list(await asyncio.gather(*map(one, ids)))

    assert asyncio.run(both()) == [ENTRIES, ENTRIES]


def test_a_command_after_an_open_is_answered_once_its_channel_is_heard(redis_client: Redis, server_url: str) -> None:
    async def story() -> list[Heard]:
        async with _opened(server_url) as hub:
            reader = TokenReader(hub, "h1")
            reader.open()
            rest = _rest(reader)
            entries = [f"{index} {entry.encode()}" for index, entry in enumerate(ENTRIES)]
            script = "for _, each in ipairs(ARGV) do redis.call('PUBLISH', KEYS[1], each) end return #ARGV"
            assert await hub.ask("EVAL", script, 1, keys.HandoffKeys("h1").notify, *entries) == len(ENTRIES)
            assert rest.done()
            reader.close()
            return await rest

    assert asyncio.run(story()) == ENTRIES


def test_a_url_that_wants_resp2_is_served_too(redis_client: Redis, server_url: str) -> None:
    async def story() -> object:
        async with _opened(f"{server_url}?protocol=2") as hub, _reading(hub, "h1"):
            return await hub.ask("ECHO", "x")

    assert asyncio.run(story()) == b"x"


def test_a_script_the_server_has_lost_is_sent_whole(redis_client: Redis, server_url: str) -> None:
    async def story() -> list[object]:
        async with _opened(server_url) as hub:
            found: list[object] = []
            for _ in range(2):
                found += [await hub.run(Step("own", ["o"], [60_000])), redis_client.get("o")]
                redis_client.delete("o")
                redis_client.script_flush()
            return found

    assert asyncio.run(story()) == [b"OK", b"1"] * 2


def test_a_refusal_is_a_broker_error_and_the_line_goes_on(redis_client: Redis, server_url: str) -> None:
    async def story() -> object:
        redis_client.set("text", "x")
        async with _opened(server_url) as hub:
            with pytest.raises(BrokerError, match="WRONGTYPE"):
                await hub.ask("LPUSH", "text", "y")
            return await hub.ask("GET", "text")

    assert asyncio.run(story()) == b"x"


def test_a_reply_that_does_not_come_is_an_error_and_mixes_up_no_other(redis_client: Redis, server_url: str) -> None:
    async def story(hop: Proxy) -> list[object]:
        async with _opened(hop.url) as hub:
            await hub.ask("SET", "a", "1")
            with hop.hold(b"$3\r\nGET"):
                with pytest.raises(BrokerError, match=r"no reply within 0\.2 s"):
                    await hub.ask("GET", "a", patience_s=0.2)
                late = asyncio.create_task(hub.ask("STRLEN", "a"))
                await asyncio.sleep(0)
            return [await late, await hub.ask("GET", "a")]

    with Proxy(urlsplit(server_url).port or 0) as hop:
        assert asyncio.run(story(hop)) == [1, b"1"]


def test_a_reply_that_is_lost_is_an_error_at_once(redis_client: Redis, server_url: str) -> None:
    async def story(hop: Proxy) -> object:
        async with _opened(hop.url) as hub:
            await hub.ask("PING")
            hop.lose(b"$4\r\nINCR")
            with pytest.raises(BrokerError, match="the connection was lost"):
                await hub.ask("INCR", "a", patience_s=3600)
            return await hub.ask("GET", "a")  # over the next line

    with Proxy(urlsplit(server_url).port or 0) as hop:
        assert asyncio.run(story(hop)) == b"1"


def test_a_server_that_is_silent_for_long_is_left(
    redis_client: Redis, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection lives, and no reply comes: the next line may have better luck."""
    monkeypatch.setattr("pipeline.broker.hub.REPLY_TIMEOUT_S", 0.3)

    async def story(hop: Proxy) -> object:
        async with _opened(hop.url) as hub:
            await hub.ask("PING")
            hop.apply(Faults(stall_bytes=0, limit="down"))
            with pytest.raises(BrokerError, match=r"the connection was lost: no reply within 0\.3 s"):
                await hub.ask("PING", patience_s=3600)
            hop.mend()
            return await hub.ask("PING", patience_s=3600)

    with Proxy(urlsplit(server_url).port or 0) as hop:
        assert asyncio.run(story(hop)) == b"PONG"


@pytest.mark.anyio
async def test_without_a_broker_a_command_waits_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.broker.hub._AWAY_S", 0.2)
    async with _opened(f"redis://127.0.0.1:{free_port()}/0") as hub:
        with pytest.raises(BrokerError, match="no connection to it could be made"):
            await hub.ask("PING")


def test_a_channel_that_our_user_may_not_hear_ends_the_line(redis_client: Redis, server_url: str) -> None:
    """Its refusal is no reply to whatever is asked next."""
    port = urlsplit(server_url).port

    async def story() -> None:
        async with connect_async(f"redis://deaf:secret@127.0.0.1:{port}/0") as client:
            line = await Line.open(client, lambda *_: None)
            line.subscribe(b"secret")
            with pytest.raises(AwayError, match="NOPERM"):
                await line.ask(["GET", "a"])
            assert "NOPERM" in str(await line.lost)

    redis_client.acl_setuser("deaf", enabled=True, passwords=["+secret"], keys="*", categories=["+@all"])
    try:
        asyncio.run(story())
    finally:
        redis_client.acl_deluser("deaf")


def test_a_handoff_the_broker_has_lost_is_an_error_not_silence(redis_client: Redis, server_url: str) -> None:
    handoff_id = secrets.token_hex(16)
    redis_client.hset(keys.HandoffKeys(handoff_id).record, "state", "decoding")

    def write() -> None:
        _append(redis_client, handoff_id, ENTRIES[0])
        redis_client.flushall()

    with pytest.raises(BrokerError, match="lost this request"):
        asyncio.run(_read(server_url, handoff_id, write))


@contextlib.asynccontextmanager
async def _reading(hub: TokenHub, handoff_id: str) -> AsyncIterator[TokenReader]:
    """A reader whose channel is heard: what is asked next is answered after that."""
    reader = TokenReader(hub, handoff_id)
    reader.open()
    try:
        await hub.ask("PING")
        yield reader
    finally:
        reader.close()


@contextlib.asynccontextmanager
async def _opened(url: str) -> AsyncIterator[TokenHub]:
    async with connect_async(url) as client:
        hub = TokenHub(client)
        await hub.start()
        try:
            yield hub
        finally:
            await hub.close()


def _rest(reader: TokenReader) -> asyncio.Future[list[Heard]]:
    """Everything up to and with the last, listened to from now on; an error that ends it is raised."""
    ended: asyncio.Future[list[Heard]] = asyncio.get_running_loop().create_future()
    found: list[Heard] = []

    def hear(heard: Heard) -> None:
        found.append(heard)
        if isinstance(heard, Exception):
            ended.set_exception(heard)
        elif heard.last:
            ended.set_result(found)

    reader.listen(hear)
    return ended


def test_garbage_on_the_channel_disturbs_nobody(redis_client: Redis, server_url: str) -> None:
    """A message that is none ended the one task that reads for all of an API process."""

    async def story() -> list[list[Heard]]:
        async with _opened(server_url) as hub, _reading(hub, "h1") as one, _reading(hub, "h2") as two:
            for message in (b"", b"x", b"-1 {}", b"\xff\xfe {}", b"9" * 30 + b" {}", b"9" * 5000 + b" {}", b"7"):
                redis_client.publish(keys.HandoffKeys("h1").notify, message)
            for handoff_id in ("h1", "h2"):
                for entry in ENTRIES:
                    _append(redis_client, handoff_id, entry)
            return [await _rest(one), await _rest(two)]

    assert asyncio.run(story()) == [ENTRIES, ENTRIES]


def test_a_broker_that_is_away_for_a_moment_costs_a_moment(redis_client: Redis, server_url: str) -> None:
    """The reader's connections are cut and refused; the tokens of that time are read when they are back."""

    async def story(hop: Proxy) -> list[Heard]:
        async with _opened(hop.url) as hub, _reading(hub, "h1") as reader:
            rest = _rest(reader)
            _append(redis_client, "h1", ENTRIES[0])
            hop.cut()
            for entry in ENTRIES[1:]:
                _append(redis_client, "h1", entry)
            while hop.refused < 2:
                await asyncio.sleep(0.01)
            hop.mend()
            return await rest

    with Proxy(urlsplit(server_url).port or 0) as hop:
        assert asyncio.run(story(hop)) == ENTRIES


def test_a_broker_that_stays_away_is_an_error(redis_client: Redis, server_url: str) -> None:
    async def story(hop: Proxy) -> None:
        async with _opened(hop.url) as hub, _reading(hub, "h1") as reader:
            hop.cut()
            with pytest.raises(BrokerError, match="cannot read the token log"):
                await _rest(reader)

    with Proxy(urlsplit(server_url).port or 0) as hop:
        asyncio.run(story(hop))


# redis-py drops the socket of a handshake that failed without closing it
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_opening_and_closing_while_the_connection_breaks_again_and_again(redis_client: Redis, server_url: str) -> None:
    """Each task that met a broken connection made it anew: two then read one, and nothing could be opened any more."""

    async def visit(hub: TokenHub, number: int) -> None:
        with contextlib.suppress(BrokerError):
            async with _reading(hub, f"{number:032x}"):
                pass

    async def story(hop: Proxy) -> list[Heard]:
        async with _opened(hop.url) as hub:
            visits: list[asyncio.Task[None]] = []
            for round_ in range(40):
                visits = [asyncio.create_task(visit(hub, 10 * round_ + number)) for number in range(10)]
                hop.reset() if round_ % 2 else hop.cut()
                await asyncio.sleep(0.005 * (round_ % 5))
                hop.mend()
                if round_ % 8 == 0:
                    await asyncio.gather(*visits)
            await asyncio.gather(*visits)
            async with _reading(hub, "h1") as reader:
                for entry in ENTRIES:
                    _append(redis_client, "h1", entry)
                return await _rest(reader)

    with Proxy(urlsplit(server_url).port or 0) as hop:
        assert asyncio.run(story(hop)) == ENTRIES


class _Closed(asyncio.Transport):
    """One that uvloop has closed: what it then raises."""

    def write(self, data: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


@pytest.mark.anyio
async def test_a_connection_that_uvloop_has_closed_is_a_lost_line() -> None:
    line = Line(lambda *_: None)
    line._transport = _Closed()
    with pytest.raises(AwayError, match="the handler is closed"):
        await line.ask(["PING"])
    assert "the handler is closed" in str(await line.lost)


class _HeldLog(TokenHub):
    """A hub whose log is read when the test says so, with what is in it by then."""

    def __init__(self) -> None:
        self.read = asyncio.Event()
        self.entries: list[bytes] = []
        self.asked: list[int] = []

    async def log(self, handoff_id: str, start: int) -> list[bytes]:
        self.asked.append(start)
        found = self.entries[start:]
        await self.read.wait()
        return found

    async def known(self, handoff_id: str) -> bool:
        return False


@pytest.mark.anyio
async def test_what_is_published_while_the_log_is_read_is_not_lost() -> None:
    hub = _HeldLog()
    raw = [entry.encode().encode() for entry in ENTRIES]
    hub.entries = raw[:4]
    reader = TokenReader(hub, "h1")
    reader.put(0, raw[0])
    reader.put(3, raw[3])  # 1 and 2 were lost
    heard: list[Heard] = []
    reader.listen(heard.append)
    assert heard == ENTRIES[:1]
    await asyncio.sleep(0)
    reader.put(5, raw[5])  # 4 is in the log after it was read
    hub.entries = raw[:6]
    hub.read.set()
    while len(heard) < 6:
        await asyncio.sleep(0)
    reader.put(5, raw[5])
    reader.put(6, raw[6])
    assert heard == ENTRIES[:7]
    assert hub.asked == [1, 4]


@pytest.mark.anyio
async def test_nothing_is_looked_for_before_anybody_listens() -> None:
    """A submit may take long: until it is through there is no record, and that must not look like one that was lost."""
    hub = _HeldLog()
    hub.read.set()
    reader = TokenReader(hub, "h1")
    heard: list[Heard] = []
    for _ in range(20):
        reader.tick()
        reader.look()
        await asyncio.sleep(0)
    assert hub.asked == []
    reader.listen(heard.append)
    while not heard:
        reader.tick()
        await asyncio.sleep(0)
    assert [str(each) for each in heard] == ["the broker has lost this request: it was restarted or emptied"]
    assert hub.asked == [0, 0]


@pytest.mark.anyio
async def test_an_entry_that_cannot_be_read_ends_the_answer() -> None:
    reader = TokenReader(_HeldLog(), "h1")
    heard: list[Heard] = []
    reader.listen(heard.append)
    reader.put(0, b"{}")
    reader.put(1, ENTRIES[1].encode().encode())
    assert [type(each) for each in heard] == [PeerError]
    assert not reader.finished
