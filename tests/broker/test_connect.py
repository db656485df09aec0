"""Connections: what is refused at the start, and what a failing network looks like to us."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from redis import Redis
from redis.exceptions import ClusterDownError, MasterDownError, RedisError, ResponseError

from pipeline.broker import connect as connections
from pipeline.broker.connect import (
    ServerInfo,
    connect,
    connect_async,
    connect_blocking,
    margin_bytes,
    redact,
    require_ready,
    server_info,
    translate,
)
from pipeline.errors import BrokerError, BudgetTooSmallError, ConfigError
from pipeline.settings import MIB

BUDGET = 32 * MIB
NEEDED = BUDGET + 64 * MIB + BUDGET // 4


@pytest.fixture
def clean(redis_client: Redis) -> Iterator[Redis]:
    yield redis_client
    redis_client.config_set("maxmemory-policy", "noeviction")


def test_replies_are_bytes_and_url_is_checked(server_url: str, redis_client: Redis) -> None:
    with connect(server_url) as client:
        client.set("k", "v")
        assert client.get("k") == b"v"
    for wrong in ("http://x", "localhost:6379", ""):
        with pytest.raises(ConfigError, match=r"broker\.url"):
            connect(wrong)


def test_a_password_is_never_shown() -> None:
    assert redact("redis://user:geheim@host:1/0") == "redis://user:***@host:1/0"
    assert redact("redis://:geheim@host:1/0") == "redis://:***@host:1/0"
    assert redact("redis://host:1/0") == "redis://host:1/0"
    with pytest.raises(ConfigError) as caught:
        connect("http://:geheim@host")
    assert "geheim" not in str(caught.value)


def test_a_healthy_server_says_what_it_is(server_url: str, clean: Redis) -> None:
    info = require_ready(clean, BUDGET, 4096)
    assert info.kind in ("valkey", "redis")
    assert info.version >= (7, 0)
    assert len(info.run_id) == 40
    assert (info.maxmemory_bytes, info.policy) == (0, "noeviction")


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lru", "allkeys-random"])
def test_an_evicting_policy_is_refused(clean: Redis, policy: str) -> None:
    clean.config_set("maxmemory-policy", policy)
    with pytest.raises(ConfigError, match=f"maxmemory-policy is {policy}"):
        require_ready(clean, BUDGET, 4096)


def test_maxmemory_must_hold_budget_and_margin(clean: Redis) -> None:
    assert BUDGET + margin_bytes(BUDGET) == NEEDED
    clean.config_set("maxmemory", NEEDED)
    assert require_ready(clean, BUDGET, 4096).maxmemory_bytes == NEEDED
    clean.config_set("maxmemory", NEEDED - 1)
    with pytest.raises(ConfigError, match=f"needs {NEEDED}"):
        require_ready(clean, BUDGET, 4096)


def test_a_budget_below_one_value_is_refused(clean: Redis) -> None:
    assert require_ready(clean, 4096, 4096).policy == "noeviction"
    with pytest.raises(BudgetTooSmallError):
        require_ready(clean, 4095, 4096)


@pytest.mark.parametrize(("kind", "version", "ok"), [
    ("redis", (6, 2, 14), False),
    ("redis", (7, 0, 0), True),
    ("valkey", (7, 2, 4), True),
    ("valkey", (7, 1, 9), False),
])  # fmt: skip
def test_old_servers_are_refused(
    clean: Redis, monkeypatch: pytest.MonkeyPatch, kind: str, version: tuple[int, ...], ok: bool
) -> None:
    info = replace(server_info(clean), kind=kind, version=version)

    def fake(client: Redis) -> ServerInfo:
        return info

    monkeypatch.setattr(connections, "server_info", fake)
    if ok:
        assert require_ready(clean, BUDGET, 4096) == info
    else:
        with pytest.raises(ConfigError, match="or newer is needed"):
            require_ready(clean, BUDGET, 4096)


# -- failures


def test_nobody_listens() -> None:
    with connect("redis://127.0.0.1:1/0") as client, pytest.raises(BrokerError, match="unreachable"), translate():
        client.ping()


@pytest.fixture
def black_hole() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in held:
            connection.close()


def test_a_server_that_never_answers_is_given_up(black_hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REPLY_TIMEOUT_S", 0.5)
    with connect(black_hole) as client, pytest.raises(BrokerError, match="did not answer in time"), translate():
        client.ping()


def test_a_wrong_password_is_named(server_url: str, redis_client: Redis) -> None:
    redis_client.acl_setuser("reader", enabled=True, passwords=["+right"], keys=["*"], commands=["+get", "+ping"])
    try:
        host = server_url.removeprefix("redis://")
        with connect(f"redis://reader:wrong@{host}") as client, pytest.raises(BrokerError, match="credentials"):  # noqa: SIM117
            with translate():
                client.ping()
        with connect(f"redis://reader:right@{host}") as client, pytest.raises(BrokerError, match="forbids"):  # noqa: SIM117
            with translate():
                client.set("k", "v")
    finally:
        redis_client.acl_deluser("reader")


def test_a_full_server_is_named(clean: Redis) -> None:
    clean.config_set("maxmemory", 1)
    with pytest.raises(BrokerError, match="full"), translate():
        clean.set("k", "v")
    pipe = clean.pipeline()
    pipe.set("k", "v")
    pipe.set("l", "w")
    with pytest.raises(BrokerError, match="full"), translate():
        pipe.execute()
    with pytest.raises(BrokerError, match="full"), translate():
        clean.eval("#!lua\nreturn redis.call('SET', KEYS[1], 'v')", 1, "k")


@pytest.mark.parametrize(
    "error",
    [
        MasterDownError("Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
        ClusterDownError("The cluster is down"),
        ResponseError("BUSY Redis is busy running a script."),
        ResponseError("MISCONF Redis is configured to save RDB snapshots, but is unable to persist to disk."),
    ],
)
def test_a_server_in_trouble_is_a_broker_error(error: RedisError) -> None:
    with pytest.raises(BrokerError, match="refused a command") as caught, translate():
        raise error
    assert caught.value.retryable
    assert str(error) in str(caught.value)


def test_other_errors_pass_through(clean: Redis) -> None:
    clean.set("k", "v")
    with pytest.raises(BrokerError, match="WRONGTYPE"), translate():
        clean.lpush("k", "v")
    with pytest.raises(ZeroDivisionError), translate():
        raise ZeroDivisionError


def test_a_cut_connection_is_replaced_without_a_failure(server_url: str, redis_client: Redis) -> None:
    """The pool sees that the idle connection was closed before it sends anything on it."""
    with connect(server_url) as client:
        mine = client.client_id()
        redis_client.client_kill_filter(_id=str(mine))
        while any(entry["id"] == str(mine) for entry in redis_client.client_list()):
            time.sleep(0.01)
        assert client.ping() is True
        assert client.client_id() != mine


@pytest.fixture
def reply_eater(server_url: str) -> Iterator[str]:
    """URL of a proxy that passes everything on, but cuts the connection instead of answering an INCR."""
    host, port = server_url.removeprefix("redis://").removesuffix("/0").split(":")

    def serve(near: socket.socket) -> None:
        with near, socket.create_connection((host, int(port))) as far:
            while asked := near.recv(65536):
                far.sendall(asked)
                answer = far.recv(65536)
                if b"INCR" in asked:
                    return
                near.sendall(answer)

    def accept() -> None:
        while True:
            try:
                near, _ = server.accept()
            except OSError:
                return
            thread = threading.Thread(target=serve, args=(near,))
            thread.start()
            threads.append(thread)

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        server.shutdown(socket.SHUT_RDWR)
        acceptor.join()
    for thread in threads:
        thread.join()


def test_a_command_whose_reply_is_lost_ran_once(reply_eater: str, redis_client: Redis) -> None:
    with connect(reply_eater) as client:
        with pytest.raises(BrokerError, match="unreachable"), translate():
            client.incr("n")
        assert client.get("n") == b"1"  # on a fresh connection


def test_a_blocking_client_outlasts_the_reply_timeout(
    server_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REPLY_TIMEOUT_S", 0.5)
    with connect_blocking(server_url) as client:
        assert client.blpop(["empty"], timeout=1) is None
    with connect(server_url) as client, pytest.raises(BrokerError, match="in time"), translate():
        client.blpop(["empty"], timeout=1)


def test_asyncio_clients(server_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REPLY_TIMEOUT_S", 0.5)

    async def story() -> None:
        async with connect_async(server_url) as client:
            with pytest.raises(BrokerError, match="in time"), translate():
                await client.blpop(["empty"], timeout=1)

    asyncio.run(story())
