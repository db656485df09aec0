"""A replica's care for page servers: its own one down means unready; leases are kept wherever handoffs hold credit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from pipeline.broker import keys, stream
from pipeline.broker.address import Address
from pipeline.broker.connect import connect
from pipeline.broker.embedded import EmbeddedServer
from pipeline.broker.page_server import PageServers
from pipeline.broker.record import Snapshot
from pipeline.engines.base import Capabilities
from pipeline.errors import BrokerError, ConfigError
from pipeline.handoff import Attempts, State
from pipeline.settings import MIB, BrokerSettings, Settings, WorkerSettings
from pipeline.workers.page_keeper import IDLE_S, PageKeeper, own_address
from tests.ports import free_port
from tests.stages.fake import PAGE_BYTES
from tests.stages.stand import eventually
from tests.workers.scene import Scene

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
SETTINGS = BrokerSettings(payload_ttl_s=60)
HANDOFF = "ab" * 16


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path, MIB, port=free_port())
    server.start()
    yield server
    server.stop()


@pytest.fixture
def pages(beside: EmbeddedServer) -> Iterator[Redis]:
    with connect(_url(beside)) as client:
        yield client


def _url(server: EmbeddedServer) -> str:
    return f"redis://127.0.0.1:{server._port}/0"


def _worker(**fields: object) -> WorkerSettings:
    return WorkerSettings.model_validate({"name": "w", "engine": "fake", "model": Path("m"), **fields})


def test_what_a_worker_advertises(server_url: str) -> None:
    settings = Settings(broker=BrokerSettings(budget_bytes=7))
    assert own_address(settings, _worker()) is None
    assert own_address(settings, _worker(pages_url="redis://box:1/0")) == ("redis://box:1/0", 7)
    assert own_address(settings, _worker(pages_url="redis://box:1/0", pages_budget_bytes=9, role="decode"))[1] == 9  # type: ignore[index]
    with pytest.raises(ConfigError, match="for replicas that decode"):
        own_address(settings, _worker(pages_url="redis://box:1/0", role="prefill"))
    with pytest.raises(ConfigError, match="pages_password"):
        own_address(settings, _worker(pages_url="redis://:x@box:1/0"))


def _keeper(client: Redis, own: Address | None, where: dict[str, Address | None]) -> PageKeeper:
    def seen(handoff_id: str) -> Snapshot | None:
        address = where[handoff_id]
        return Snapshot(handoff_id, State.STREAMING, {"page_server": str(address)} if address else {})

    def peek(handoff_id: str) -> Snapshot | None:
        there = client.exists(keys.HandoffKeys(handoff_id).record)
        return Snapshot(handoff_id, State.STREAMING, {}) if there else None

    return PageKeeper(PageServers(client, SETTINGS), own, lambda: list(where), seen, peek, SETTINGS)


def test_leases_are_kept_where_the_credit_is(redis_client: Redis, beside: EmbeddedServer, pages: Redis) -> None:
    """One server that is gone is no reason to let another handoff's lease end."""
    gone, there = Address(f"redis://127.0.0.1:{free_port()}/0", MIB), Address(_url(beside), MIB)
    keeper = _keeper(redis_client, None, {"a" * 32: gone, "b" * 32: gone, HANDOFF: there, "c" * 32: None})
    stream.raise_fence(pages, HANDOFF, Attempts(1, 1), SETTINGS)
    pages.zadd(keys.BUDGET_LEASES, {HANDOFF: 1})
    pages.hset(keys.HandoffKeys(HANDOFF).credits, "1.1.0", "10")
    keeper.renew()
    lease_ms = pages.zscore(keys.BUDGET_LEASES, HANDOFF)
    seconds = int(pages.time()[0])
    assert lease_ms is not None
    assert 30 < float(lease_ms) / 1000 - seconds <= 61


def test_what_nobody_keeps_on_our_own_is_taken_back(redis_client: Redis, beside: EmbeddedServer, pages: Redis) -> None:
    keeper = _keeper(redis_client, Address(_url(beside), MIB), {})
    stream.raise_fence(pages, HANDOFF, Attempts(1, 1), SETTINGS)
    pages.set(keys.BUDGET_TOTAL, 10)
    pages.hset(keys.BUDGET_HELD, HANDOFF, "10")
    pages.zadd(keys.BUDGET_LEASES, {HANDOFF: 1})
    keeper.look()
    assert keeper.up
    assert stream.gauges(pages) == (0, 0, 0)
    assert pages.exists(keys.HandoffKeys(HANDOFF).fence) == 0


def test_what_is_left_of_a_handoff_that_nobody_knows_goes(
    redis_client: Redis, beside: EmbeddedServer, pages: Redis
) -> None:
    """Its release was owed by a process that died. One that is kept stays, and one of which there is a record."""
    keeper = _keeper(redis_client, Address(_url(beside), MIB), {})
    left, standing, kept = ("a" * 32, "b" * 32, "c" * 32)
    for handoff in (left, standing, kept):
        stream.raise_fence(pages, handoff, Attempts(1, 1), SETTINGS)
        pages.xadd(keys.HandoffKeys(handoff).stream, {"h": b"x"})
    for handoff in (left, standing):
        fence = keys.HandoffKeys(handoff).fence
        pages.pexpire(fence, pages.pttl(fence) - int(1000 * IDLE_S) - 1)  # so long ago it was kept for the last time
    redis_client.hset(keys.HandoffKeys(standing).record, "state", "streaming")
    keeper.sweep()
    assert {keys.handoff_of(key.decode()) for key in pages.scan_iter("cf:{*")} == {standing, kept}
    redis_client.delete(keys.HandoffKeys(standing).record)
    keeper.up = False
    keeper.sweep()
    assert pages.exists(keys.HandoffKeys(standing).fence) == 1  # one that does not answer is left alone
    keeper.up = True
    keeper.sweep()
    assert {keys.handoff_of(key.decode()) for key in pages.scan_iter("cf:{*")} == {kept}


def test_a_server_that_could_not_serve_is_refused_at_the_start(
    redis_client: Redis, beside: EmbeddedServer, pages: Redis
) -> None:
    address = Address(_url(beside), MIB)
    pages.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match=f"page server {address.url}'s maxmemory-policy is allkeys-lru"):
        _keeper(redis_client, address, {}).start(64)
    with pytest.raises(ConfigError, match="cannot hold one page"):
        _keeper(redis_client, address, {}).start(2 * MIB)
    with pytest.raises(BrokerError, match="is unreachable"):
        _keeper(redis_client, Address(f"redis://127.0.0.1:{free_port()}/0", MIB), {}).start(64)


def test_a_replica_is_unready_while_its_page_server_is_down(
    server_url: str, redis_client: Redis, beside: EmbeddedServer, pages: Redis
) -> None:
    """And serves again when it is back. What was asked meanwhile is answered, computed here."""
    scene = Scene(server_url, redis_client, pages_url=_url(beside))
    scene.engine.capabilities = Capabilities(max_running=4)
    try:
        scene.start()
        first = scene.ask()
        scene.finish(first)
        eventually(lambda: stream.gauges(pages) == (0, 0, 0), "nothing in flight")
        trace = scene.ledger.trace(first.handoff_id) or scene.ledger.ended(first.handoff_id)
        assert trace is not None
        assert (trace["page_server"], trace["pages"]) == (_url(beside), 4)

        def load() -> dict[str, int]:
            found = scene.replica()
            return found.load if found else {}

        assert scene.replica().pages == (_url(beside), 8 * PAGE_BYTES)  # type: ignore[union-attr]
        assert not load().get("draining")
        assert beside.pid is not None
        os.kill(beside.pid, signal.SIGKILL)
        eventually(lambda: load().get("draining") == load().get("page_server_down") == 1, "unready")
        meanwhile = scene.ask()
        scene.finish(meanwhile)
        assert scene.ledger.peek(meanwhile.handoff_id).recomputed == "page_server_unavailable"  # type: ignore[union-attr]
        beside.stop()
        beside.start()
        eventually(lambda: not load().get("draining"), "ready again")
        scene.finish(scene.ask())
    finally:
        scene.close()
