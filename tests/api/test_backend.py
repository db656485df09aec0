"""BrokerBackend on a real server; the test plays the decode worker through the ledger."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from anyio import to_thread
from redis import Redis

from pipeline.api.backend import BrokerBackend, _every
from pipeline.broker import queue, scripts
from pipeline.broker.channel import TokenEntry
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import connect
from pipeline.broker.embedded import EmbeddedServer
from pipeline.broker.job import open_queue
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.queue import DECODE_JOB, PREFILL_JOB
from pipeline.broker.registry import Registry, Replica
from pipeline.contract import Contract
from pipeline.errors import (
    BrokerError,
    ConfigError,
    InvalidParameterError,
    KvRoomError,
    NoReplicaError,
    OverloadedError,
)
from pipeline.handoff import Event, State
from pipeline.request import Request, Sampling
from pipeline.routing import Wish
from pipeline.settings import ApiSettings, BrokerSettings, Settings
from tests.api.fake import told
from tests.ports import free_port
from tests.proxy import Proxy

pytestmark = pytest.mark.anyio
MIB = 1 << 20
PATIENCE_S = 60.0
CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)


class Named(NamedTuple):
    name: str
    contract: Contract


MODEL = Named("tiny", CONTRACT)
SHORT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=64)
PREFILL = f"prefill.vllm.{CONTRACT.digest[:8]}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer(tmp_path_factory.mktemp("broker"), 64 * MIB) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[Redis]:
    opened = connect(url)
    opened.flushall()
    yield opened
    opened.close()


@pytest.fixture
def ledger(client: Redis, settings: Settings) -> Ledger:
    return Ledger(client, PageServers(client, settings.broker), BrokerClock(client), settings)


@pytest.fixture
def settings(url: str) -> Settings:
    return Settings(broker=BrokerSettings(url=url, budget_bytes=64 * MIB))


@pytest.fixture
async def backend(client: Redis, settings: Settings) -> AsyncIterator[BrokerBackend]:
    made = BrokerBackend(settings, [MODEL])
    await made.start()
    yield made
    await made.close()


def register(client: Redis, name: str, engine: str, contract: Contract = CONTRACT) -> None:
    Registry(client).register(Replica(name, engine, "both", "tiny", contract, slots=4, started_ms=0), 60)


def request(tokens: int = 3, max_tokens: int = 8) -> Request:
    return Request(secrets.token_hex(16), tuple(range(1, tokens + 1)), Sampling(max_tokens=max_tokens))


async def test_a_prompt_from_jobs_to_tokens(backend: BrokerBackend, client: Redis, ledger: Ledger) -> None:
    register(client, "mac", "mlx")
    register(client, "box", "vllm")
    asked = request()
    submission = await backend.submit(asked, Wish("vllm", "mlx"), MODEL)
    reading = told(submission)
    [decode], [prefill] = (open_queue(client, name).get_jobs() for name in ("decode.mac", PREFILL))
    assert (decode.func_name, list(decode.args)) == (DECODE_JOB, [asked.handoff_id])
    assert (prefill.func_name, list(prefill.args)) == (PREFILL_JOB, [asked.handoff_id])
    assert decode.meta == prefill.meta == {"state": "live", "model": "tiny", "route": "vllm->mlx"}
    record = ledger.load(asked.handoff_id)
    assert record is not None
    assert (record.request, record.contract) == (asked, CONTRACT)
    assert record.route == {
        "prefill_engine": "vllm",
        "prefill_queue": PREFILL,
        "decode_replica": "mac",
        "decode_queue": "decode.mac",
        "decode_engine": "mlx",
    }
    assert ledger.owned(record)

    attempt, _ = ledger.enter(asked.handoff_id, "decode", "mac")
    ledger.advance(asked.handoff_id, "decode", attempt, Event.COMMIT)
    entries = [TokenEntry(0, (5, 6)), TokenEntry(2, (7,), finish="length", held_tokens=2)]
    for entry in entries:
        ledger.emit(asked.handoff_id, attempt, entry)
    assert await reading == entries
    ledger.leave(asked.handoff_id, "decode", attempt)
    trace = await submission.trace()
    assert trace is not None
    assert (trace["state"], trace["tokens"]) == ("finished", 3)
    await submission.close()
    assert list(client.scan_iter("cf:*{*")) == []


async def test_stop_and_cancel_reach_the_ledger(backend: BrokerBackend, client: Redis, ledger: Ledger) -> None:
    register(client, "mac", "mlx")
    stopped, cancelled = request(), request()
    for asked in (stopped, cancelled):
        submission = await backend.submit(asked, Wish(), MODEL)
        attempt, _ = ledger.enter(asked.handoff_id, "decode", "mac")
        ledger.advance(asked.handoff_id, "decode", attempt, Event.COMMIT)
        if asked is stopped:
            assert await submission.stop() is True
            assert await submission.stop() is False
        else:
            await submission.cancel("test")
        record = ledger.load(asked.handoff_id)
        assert record is not None
        assert record.state is (State.FINISHED if asked is stopped else State.CANCELLING)
        ledger.leave(asked.handoff_id, "decode", attempt)
        await submission.close()
    assert list(client.scan_iter("cf:*{*")) == []


class Hop(NamedTuple):
    """An API process behind a proxy, whose requests have begun before, so that the next one's script is the marker."""

    proxy: Proxy
    backend: BrokerBackend
    begin: bytes


@pytest.fixture
async def hop(client: Redis, settings: Settings, url: str) -> AsyncIterator[Hop]:
    register(client, "mac", "mlx")
    begin: Any = client.script_load(scripts.source("begin"))
    with Proxy(urlsplit(url).port or 0) as proxy:
        broker = settings.broker.model_copy(update={"url": proxy.url})
        made = BrokerBackend(settings.model_copy(update={"broker": broker}), [MODEL])
        await made.start()
        first = await made.submit(request(), Wish(), MODEL)
        await first.cancel("test")
        await first.close()
        open_queue(client, "decode.mac").empty()
        yield Hop(proxy, made, begin.encode())
        proxy.mend()
        await made.close()


async def test_a_submit_nobody_waits_for_leaves_nothing(hop: Hop, client: Redis, ledger: Ledger) -> None:
    asked = request()
    with hop.proxy.hold(hop.begin) as held:
        submitting = asyncio.create_task(hop.backend.submit(asked, Wish(), MODEL))
        await to_thread.run_sync(held.wait)
        submitting.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):  # the record was written although the client is gone
        await submitting
    assert len(open_queue(client, "decode.mac").get_jobs()) == 1
    assert ledger.live() == []
    assert list(client.scan_iter("cf:*{*")) == []
    assert client.pubsub_channels("cf:{*") == []


async def test_one_that_began_for_nobody_is_ended_later_where_it_cannot_be_at_once(
    backend: BrokerBackend, ledger: Ledger, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that can never be ended keeps nobody from the others."""
    register(client, "mac", "mlx")
    asked, abandon = request(), backend._abandon
    await backend.submit(asked, Wish(), MODEL)
    begun: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    begun.set_result(1)

    def away(handoff_id: str) -> None:
        raise BrokerError("away")

    monkeypatch.setattr(backend, "_abandon", away)
    await backend._undo(asked.handoff_id, begun)
    assert backend._doubtful == {asked.handoff_id: 0.0}
    with pytest.raises(BrokerError):
        backend._settle_doubts()

    def odd(handoff_id: str) -> None:
        if handoff_id == "odd":
            raise ValueError("no record of ours")
        abandon(handoff_id)

    monkeypatch.setattr(backend, "_abandon", odd)
    backend._doubtful = {"odd": 0.0, **backend._doubtful}
    backend._settle_doubts()
    assert backend._doubtful == {}
    assert ledger.live() == []


async def test_a_request_refused_for_a_silent_broker_does_not_begin_when_it_speaks_again(
    hop: Hop, client: Redis, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.api.backend._BEGIN_S", 0.2)
    asked = request()
    with hop.proxy.hold(hop.begin) as held:
        submitting = asyncio.create_task(hop.backend.submit(asked, Wish(), MODEL))
        await to_thread.run_sync(held.wait)
        with pytest.raises(BrokerError, match=r"no reply within 0\.7 s"):
            await submitting
    async with asyncio.timeout(PATIENCE_S):
        while hop.backend._doubtful:  # what was held has been read by then: a later command of the same line was
            await asyncio.sleep(0.05)
        await hop.backend._hub.ask("PING", patience_s=PATIENCE_S)
    assert ledger.load(asked.handoff_id) is None
    assert open_queue(client, "decode.mac").get_jobs() == []
    assert list(client.scan_iter("cf:*{*")) == []


async def test_a_request_whose_reply_was_lost_is_ended(
    hop: Hop, client: Redis, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.api.backend._BEGIN_S", 0.5)
    asked = request()
    hop.proxy.lose(hop.begin)
    with pytest.raises(BrokerError, match="the connection was lost"):
        await hop.backend.submit(asked, Wish(), MODEL)
    assert len(open_queue(client, "decode.mac").get_jobs()) == 1  # it has begun
    async with asyncio.timeout(PATIENCE_S):
        while list(client.scan_iter("cf:*{*")):
            await asyncio.sleep(0.05)
    assert ledger.live() == []
    assert client.pubsub_channels("cf:{*") == []


async def test_one_reading_of_the_registry_serves_all_that_wait(
    backend: BrokerBackend, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(client, "mac", "mlx")
    read, go, readings = backend._router._read, threading.Event(), list[int]()

    def slow() -> list[Replica]:
        readings.append(1)
        go.wait()
        return read()

    monkeypatch.setattr(backend._router, "_read", slow)
    monkeypatch.setattr("pipeline.api.router.FRESH_S", 3600.0)
    backend._router._read_at = -7200.0
    submitting = [asyncio.create_task(backend.submit(request(), Wish(), MODEL)) for _ in range(5)]
    while not readings:
        await asyncio.sleep(0)
    submitting[0].cancel()  # and none of the others
    await asyncio.wait([submitting[0]])
    go.set()
    for submission in await asyncio.gather(*submitting[1:]):
        await submission.cancel("test")
        await submission.close()
    assert readings == [1]
    assert len(open_queue(client, "decode.mac").get_jobs()) == 4


async def test_what_cannot_be_routed_is_refused_and_leaves_nothing(backend: BrokerBackend, client: Redis) -> None:
    with pytest.raises(NoReplicaError):
        await backend.submit(request(), Wish(), MODEL)
    register(client, "mac", "mlx")
    with pytest.raises(InvalidParameterError):
        await backend.submit(request(), Wish("tpu", "mlx"), MODEL)
    assert list(client.scan_iter("*{*")) == []
    assert client.pubsub_channels("cf:{*") == []


async def test_load_of_our_own_is_seen_before_the_replica_reports_it(backend: BrokerBackend, client: Redis) -> None:
    register(client, "a", "mlx")
    register(client, "b", "mlx")
    first = await backend.submit(request(), Wish(), MODEL)
    second = await backend.submit(request(), Wish(), MODEL)
    lengths = queue.queue_lengths(client, ["decode.a", "decode.b"])
    assert lengths == {"decode.a": 1, "decode.b": 1}
    for submission in (first, second):
        await submission.cancel("test")
        await submission.close()
    await backend.submit(request(), Wish(), MODEL)
    assert queue.queue_lengths(client, ["decode.a"]) == {"decode.a": 2}


async def test_a_replica_with_a_shorter_window_shortens_the_answer(
    backend: BrokerBackend, client: Redis, ledger: Ledger
) -> None:
    register(client, "mac", "mlx", SHORT)
    asked = request(tokens=60, max_tokens=100)
    await backend.submit(asked, Wish(), MODEL)
    record = ledger.load(asked.handoff_id)
    assert record is not None
    assert record.request.sampling.max_tokens == 4


async def test_ready_and_status(backend: BrokerBackend, client: Redis) -> None:
    with pytest.raises(NoReplicaError):
        await backend.require_ready(MODEL)
    register(client, "box", "vllm")
    await backend.require_ready(MODEL)
    asked = request()
    await backend.submit(asked, Wish(), MODEL)
    status = await backend.status()
    assert status["live"] == [asked.handoff_id]
    assert status["queues"] == {"decode.box": 1, PREFILL: 0}
    assert status["budget"] == {"budget_bytes": 64 * MIB, "in_flight_bytes": 0, "waiters": 0, "handoffs": 0}
    [replica] = status["replicas"]
    assert (replica["name"], replica["engine"], replica["load"], replica["stats"]) == ("box", "vllm", {}, {})
    assert replica["contract"] == {"digest": CONTRACT.digest, "context_length": 2048}


async def test_two_models_behind_one_api(client: Redis, settings: Settings, ledger: Ledger) -> None:
    other = Named("other", Contract("W", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=9, context_length=99))
    backend = BrokerBackend(settings, [MODEL, other])
    await backend.start()
    register(client, "box", "vllm")
    with pytest.raises(NoReplicaError):  # and not a mismatch: what serves the other model is no fault
        await backend.require_ready(other)
    with pytest.raises(NoReplicaError):
        await backend.submit(request(), Wish(), other)
    register(client, "mac", "mlx", other.contract)
    for model, replica in ((MODEL, "box"), (other, "mac")):
        asked = request()
        await backend.submit(asked, Wish(), model)
        record = ledger.load(asked.handoff_id)
        assert record is not None
        assert (record.contract, record.route["decode_replica"]) == (model.contract, replica)
        [job] = open_queue(client, f"decode.{replica}").get_jobs()
        assert job.meta["model"] == model.name
    await backend.close()


async def test_the_owner_lease_is_kept_alive(backend: BrokerBackend, client: Redis) -> None:
    [owner] = list(client.scan_iter("cf:owner:*"))
    client.pexpire(owner, 1500)
    while client.pttl(owner) <= 1500:
        await asyncio.sleep(0.05)


async def test_a_periodic_step_needs_none_of_the_threads_that_requests_share() -> None:
    """Else a crowd of long prompts, each with a thread, lets the owner's lease lapse."""
    shared, loop = to_thread.current_default_thread_limiter(), asyncio.get_running_loop()
    done, beaten = threading.Event(), asyncio.Event()
    crowd = [asyncio.create_task(to_thread.run_sync(done.wait)) for _ in range(int(shared.total_tokens))]
    beat = asyncio.create_task(_every(3600, lambda: loop.call_soon_threadsafe(beaten.set)))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while shared.available_tokens:
                await asyncio.sleep(0.01)
            await beaten.wait()
    finally:
        done.set()
        beat.cancel()
        await asyncio.gather(beat, *crowd, return_exceptions=True)


def test_a_broker_that_evicts_is_refused(client: Redis, settings: Settings) -> None:
    made = BrokerBackend(settings, [MODEL])
    made.require_broker([MODEL])
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ConfigError, match="noeviction"):
            made.require_broker([MODEL])
    finally:
        client.config_set("maxmemory-policy", "noeviction")


async def _refusal(backend: BrokerBackend) -> type[Exception]:
    with pytest.raises((BrokerError, NoReplicaError)) as caught:
        await backend.require_ready(MODEL)
    return caught.type


async def test_without_a_broker_it_starts_refuses_and_serves_once_there_is_one(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    made = BrokerBackend(Settings(broker=BrokerSettings(url=url, budget_bytes=64 * MIB)), [MODEL])
    with pytest.raises(BrokerError):
        made.require_broker([MODEL])
    made.await_broker([MODEL])
    await made.start()
    try:
        for _ in range(2):
            with pytest.raises(BrokerError, match="not been fit for use"):
                await made.submit(request(), Wish(), MODEL)
            with pytest.raises(BrokerError, match="not been fit for use"):
                await made.require_ready(MODEL)
        with EmbeddedServer(tmp_path, 64 * MIB, port=port), connect(url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")  # there, and not fit
            await asyncio.sleep(1.5)
            with pytest.raises(BrokerError, match="not been fit for use"):
                await made.require_ready(MODEL)
            client.config_set("maxmemory-policy", "noeviction")
            async with asyncio.timeout(60):
                while await _refusal(made) is BrokerError:
                    await asyncio.sleep(0.05)
            assert await _refusal(made) is NoReplicaError
    finally:
        await made.close()


async def test_a_broker_that_came_back_empty_is_told_with_the_request_that_its_owner_lives(
    backend: BrokerBackend, client: Redis, ledger: Ledger
) -> None:
    register(client, "mac", "mlx")
    client.delete(*client.scan_iter("cf:owner:*"))
    asked = request()
    submission = await backend.submit(asked, Wish(decode="mlx", local=True), MODEL)
    record = ledger.load(asked.handoff_id)
    assert record is not None
    assert ledger.owned(record)
    await submission.cancel("test")
    await submission.close()


async def test_one_more_than_may_be_live_is_refused_before_anything_is_queued(
    client: Redis, settings: Settings
) -> None:
    register(client, "mac", "mlx")
    few = settings.model_copy(update={"api": ApiSettings(model=Path(), max_live=2)})
    first, second = (BrokerBackend(few) for _ in range(2))  # two API processes share the limit
    for backend in (first, second):
        await backend.start()
    held = [await first.submit(request(), Wish(), MODEL), await second.submit(request(), Wish(), MODEL)]
    for backend in (first, second):
        with pytest.raises(OverloadedError, match="2 requests are being served, 2 are the most"):
            await backend.submit(request(), Wish(), MODEL)
    assert (OverloadedError.http_status, OverloadedError.retryable) == (429, True)
    assert len(open_queue(client, "decode.mac").get_jobs()) == 2
    await held[0].cancel("test")
    await held[0].close()
    held.append(await first.submit(request(), Wish(), MODEL))
    for submission in held[1:]:
        await submission.cancel("test")
        await submission.close()
    for backend in (first, second):
        await backend.close()


async def test_an_answer_ends_where_the_kv_pool_does(backend: BrokerBackend, client: Redis, ledger: Ledger) -> None:
    small = Replica("mac", "mlx", "both", "tiny", CONTRACT, slots=4, started_ms=0, kv_tokens=64)
    Registry(client).register(small, 60)
    asked = request(tokens=60, max_tokens=50)
    await backend.submit(asked, Wish(), MODEL)
    record = ledger.load(asked.handoff_id)
    assert record is not None
    assert record.request.sampling.max_tokens == 4
    with pytest.raises(KvRoomError):
        await backend.submit(request(tokens=64), Wish(), MODEL)
    assert ledger.live() == [asked.handoff_id]
