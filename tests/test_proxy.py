"""The proxy does what it says: each fault as a client of a real server sees it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pipeline.broker.embedded import EmbeddedServer
from tests.proxy import Faults, Proxy, Way, first_held

Gone = (RedisConnectionError, ConnectionError)
BULK = b"x" * (4 << 20)


@pytest.fixture
def hop(server_url: str, redis_client: Redis) -> Iterator[Proxy]:
    with Proxy(urlsplit(server_url).port or 0) as proxy:
        yield proxy


@pytest.fixture
def client(hop: Proxy) -> Iterator[Redis]:
    with Redis.from_url(hop.url, retry=None, socket_timeout=60) as opened:
        yield opened


@pytest.fixture
def hasty(hop: Proxy) -> Iterator[Redis]:
    """Waits for a second, no longer."""
    with Redis.from_url(hop.url, retry=None, socket_timeout=1) as opened:
        yield opened


def test_it_passes_everything_on(client: Redis) -> None:
    client.set("bulk", BULK)
    assert client.get("bulk") == BULK


def test_a_cut_refuses_until_it_is_mended(hop: Proxy, client: Redis) -> None:
    client.ping()
    hop.cut()
    for _ in range(3):
        with pytest.raises(Gone):
            client.ping()
    assert hop.refused >= 2
    hop.mend()
    assert client.ping()


def test_a_lost_reply_is_of_a_command_that_ran_once(hop: Proxy, client: Redis, redis_client: Redis) -> None:
    hop.lose(b"INCR", times=2)
    for _ in range(2):
        with pytest.raises(Gone):
            client.incr("n")
    assert client.incr("n") == 3
    assert hop.lost == 2


def test_a_lost_reply_of_a_pipeline_lets_all_of_it_run(hop: Proxy, client: Redis, redis_client: Redis) -> None:
    hop.lose(b"INCR")
    with client.pipeline(transaction=False) as pipe:
        pipe.set("a", BULK)
        pipe.incr("n")
        with pytest.raises(Gone):
            pipe.execute()
    while not redis_client.exists("n"):
        time.sleep(0.01)
    assert (redis_client.get("n"), redis_client.get("a") == BULK) == (b"1", True)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_bulk_cut_in_the_middle_is_not_there_at_all(hop: Proxy, client: Redis, redis_client: Redis, way: str) -> None:
    if way == "down":
        redis_client.set("bulk", BULK)
    hop.apply(Faults(limit_bytes=1 << 20, limit=way))  # type: ignore[arg-type]
    with pytest.raises(Gone):
        client.set("bulk", BULK) if way == "up" else client.get("bulk")
    assert hop.resets == 1
    assert redis_client.get("bulk") == (BULK if way == "down" else None)


def test_a_reset_is_seen_as_one(hop: Proxy, client: Redis) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(hop.url).port or 0)) as raw:
        raw.sendall(b"PING\r\n")
        assert raw.recv(64) == b"+PONG\r\n"
        hop.reset()
        with pytest.raises(ConnectionResetError):
            raw.recv(64)
    assert (hop.resets, client.ping()) == (1, True)


def test_a_black_hole_delays_and_loses_nothing(hop: Proxy, hasty: Redis, redis_client: Redis) -> None:
    hasty.ping()
    hop.apply(Faults(black_hole=True))
    with pytest.raises(RedisTimeoutError):
        hasty.incr("n")
    assert redis_client.get("n") is None
    hop.mend()
    while redis_client.get("n") != b"1":  # what was sent arrives, though nobody waits for it any more
        time.sleep(0.01)


def test_a_command_is_held_and_all_that_comes_after_it(hop: Proxy, hasty: Redis, redis_client: Redis) -> None:
    with Redis.from_url(hop.url, retry=None, socket_timeout=1) as other, hop.hold(b"INCR") as held:
        for each in (hasty, other):
            each.set("a", b"1")
        assert not held.is_set()
        with pytest.raises(RedisTimeoutError):
            hasty.incr("n")
        assert held.is_set()
        with pytest.raises(RedisTimeoutError):
            other.set("a", b"2")
        assert (redis_client.get("n"), redis_client.get("a")) == (None, b"1")
    assert hop.lost == 0
    deadline = time.monotonic() + 60
    while (redis_client.get("n"), redis_client.get("a")) != (b"1", b"2"):  # both arrive, though nobody waits any more
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_first_of_several_hops_holds_after_so_many_commands(server_url: str, redis_client: Redis) -> None:
    port = urlsplit(server_url).port or 0
    with Proxy(port) as one, Proxy(port) as two, Redis.from_url(two.url, retry=None, socket_timeout=1) as client:
        with first_held({"one": one, "two": two}, b"INCR", after=2) as held:
            assert [client.incr("n") for _ in range(2)] == [1, 2]
            with pytest.raises(RedisTimeoutError):
                client.incr("n")
            assert (held(), redis_client.get("n")) == ("two", b"2")
        client.set("a", b"1")  # a plain hop again
        assert redis_client.get("a") == b"1"


def test_a_held_command_of_a_server_that_dies_ends_with_its_connection(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, 1 << 20)
    with (
        server as url,
        Proxy(urlsplit(url).port or 0) as hop,
        hop.hold(b"INCR") as held,
        ThreadPoolExecutor(1) as pool,
        Redis.from_url(hop.url, retry=None, socket_timeout=60) as client,
    ):
        asked = pool.submit(client.incr, "n")
        assert held.wait(60)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(Gone):
            asked.result(60)


def test_latency_bandwidth_and_slices_change_nothing_but_time(hop: Proxy, client: Redis) -> None:
    hop.apply(Faults(latency_s=0.001, bytes_per_s=20e6, piece_bytes=1500, slow_close_s=0.05))
    client.set("bulk", BULK[: 1 << 18])
    assert client.get("bulk") == BULK[: 1 << 18]


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_link_that_stalls_holds_what_it_has_until_it_is_mended(
    hop: Proxy, client: Redis, redis_client: Redis, way: Way
) -> None:
    """Who was connected before goes on; who comes later waits with it."""
    early = client.connection_pool.make_connection()
    early.connect()
    redis_client.set("there", BULK)
    hop.apply(Faults(stall_bytes=1 << 20, limit=way))
    with ThreadPoolExecutor(2) as pool, Redis.from_url(hop.url, retry=None, socket_timeout=60) as patient:
        moved = pool.submit(patient.set, "k", BULK) if way == "up" else pool.submit(patient.get, "there")
        assert hop.stalled.wait(30)
        early.send_command("PING")
        assert early.read_response() == b"PONG"
        late = pool.submit(Redis.from_url(hop.url, retry=None, socket_timeout=60).ping)
        assert not moved.done()
        assert not late.done()
        hop.mend()
        assert moved.result(60) == (True if way == "up" else BULK)
        assert late.result(60)
    assert redis_client.get("k" if way == "up" else "there") == BULK
    early.disconnect()
