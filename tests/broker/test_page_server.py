"""The page servers of one process: with whose credentials it comes, and what the end of one costs."""

from __future__ import annotations

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline.broker import keys, stream
from pipeline.broker.address import Address
from pipeline.broker.connect import PageServer, connect_pages, name_of, server_info, translate
from pipeline.broker.page_server import PageServers
from pipeline.errors import BrokerError, PageServerError, PeerError
from pipeline.handoff import Attempts
from pipeline.settings import BrokerSettings
from tests.ports import free_port

SETTINGS = BrokerSettings()
HANDOFF = "ab" * 16


def test_one_client_per_address_and_none_is_the_broker(redis_client: Redis, server_url: str) -> None:
    servers, address = PageServers(redis_client, SETTINGS), Address(server_url, 77)
    assert servers.at(None) is redis_client
    found = servers.at(address)
    assert found is servers.at(Address(server_url, 88))
    assert isinstance(found, PageServer)
    assert name_of(found) == f"page server {server_url}"
    assert found.ping()
    assert servers.settings(None) is SETTINGS
    assert servers.settings(address) == SETTINGS.model_copy(update={"budget_bytes": 77})
    servers.close()
    assert all(connection._sock is None for connection in found.connection_pool._available_connections)


@pytest.mark.parametrize("url", ["unix:///run/redis.sock", "redis://:x@box:1/0", "file:///etc/passwd"])
def test_an_address_that_nobody_should_advertise_is_the_peers_fault(redis_client: Redis, url: str) -> None:
    with pytest.raises(PeerError, match="pages_url"):
        PageServers(redis_client, SETTINGS).at(Address(url, 1))


@pytest.mark.parametrize(
    ("settings", "url", "expected"),
    [
        ({}, "redis://box:1/2", {"host": "box", "port": 1, "db": 2}),
        ({"pages_password": "a:b@c/d"}, "redis://box:1/0", {"password": "a:b@c/d", "username": None}),
        ({"pages_user": "pages", "pages_password": "p"}, "redis://box:1/0", {"username": "pages", "password": "p"}),
        (
            {"url": "rediss://u:control@b:1/0?ssl_ca_certs=/ca.pem&socket_timeout=9", "pages_password": "p"},
            "rediss://box:1/0",
            {"ssl_ca_certs": "/ca.pem", "password": "p", "socket_timeout": 5.0},
        ),
        (
            {"url": "rediss://u:control@b:1/0?ssl_ca_certs=/ca.pem"},
            "redis://box:1/0",
            {"password": None, "ssl_ca_certs": None},
        ),
    ],
)
def test_our_own_credentials_and_certificates_are_used(
    settings: dict[str, str], url: str, expected: dict[str, object]
) -> None:
    """Never the control broker's password: whoever is in the registry could ask for it."""
    with connect_pages(url, BrokerSettings.model_validate(settings)) as client:
        found = client.connection_pool.connection_kwargs
        assert {
            name: found.get(name) or None if value is None else found.get(name) for name, value in expected.items()
        } == expected


def test_failures_name_the_server_and_are_told_from_the_brokers() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    with connect_pages(url, SETTINGS) as client:
        with pytest.raises(PageServerError, match=f"page server {url} is unreachable: check the pages_url"):
            server_info(client)
        with pytest.raises(PageServerError):
            stream.gauges(client)
    with pytest.raises(BrokerError) as caught, translate():
        raise RedisConnectionError
    assert not isinstance(caught.value, PageServerError)


def test_release_gives_all_back(redis_client: Redis, server_url: str) -> None:
    servers, address = PageServers(redis_client, SETTINGS), Address(server_url, 77)
    stream.raise_fence(servers.at(address), HANDOFF, Attempts(1, 1), SETTINGS)
    servers.release(address, HANDOFF)
    assert redis_client.exists(keys.HandoffKeys(HANDOFF).fence) == 0
    servers.close()


def test_a_server_that_is_gone_is_asked_once_in_a_while(redis_client: Redis, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    servers = PageServers(redis_client, SETTINGS, lambda: now[0])
    gone = Address(f"redis://127.0.0.1:{free_port()}/0", 1)

    def warned() -> int:
        caplog.clear()
        for _ in range(3):
            servers.release(gone, HANDOFF)
        return len(caplog.records)

    assert (warned(), warned()) == (1, 0)
    now[0] += 5.0
    assert warned() == 1


def test_a_release_that_was_missed_is_made_up_for(
    redis_client: Redis, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    servers, address = PageServers(redis_client, SETTINGS, lambda: now[0]), Address(server_url, 77)
    stream.raise_fence(redis_client, HANDOFF, Attempts(1, 1), SETTINGS)
    away = connect_pages(f"redis://127.0.0.1:{free_port()}/0", SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(servers, "at", lambda _: away)
        servers.release(address, HANDOFF)
    servers.settle()  # too early
    assert redis_client.exists(keys.HandoffKeys(HANDOFF).fence) == 1
    now[0] += 5.0
    servers.settle()
    assert redis_client.exists(keys.HandoffKeys(HANDOFF).fence) == 0
    assert not servers._owed
    servers.close()
    away.close()


def test_a_strangers_keys_are_not_taken_for_handoffs_that_nobody_keeps(redis_client: Redis, server_url: str) -> None:
    servers, address = PageServers(redis_client, SETTINGS), Address(server_url, 77)
    for handoff in (HANDOFF, "cd" * 16):
        stream.raise_fence(redis_client, handoff, Attempts(1, 1), SETTINGS)
    redis_client.pexpire(keys.HandoffKeys(HANDOFF).fence, int(1000 * SETTINGS.handoff_ttl_s) - 15_001)
    for name in (b"elsewhere", b"\xff" * 32):
        redis_client.set(b"cf:{" + name + b"}:fence", "1", px=1000)
    assert servers.abandoned(address, 15.0) == [HANDOFF]
    servers.close()
