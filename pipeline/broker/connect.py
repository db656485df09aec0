"""Connections to the broker, what it must be like, and its failures in our words.

The rule here: no command is ever sent twice by itself. redis-py's default of ten retries stored an entry twice when
only the reply was lost, so a command fails once, and the pool opens a fresh connection for the next one.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from redis import ConnectionPool, Redis
from redis import exceptions as failures
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.broker.address import redact as redact
from pipeline.errors import BrokerError, BudgetTooSmallError, ConfigError, PageServerError
from pipeline.settings import MIB, BrokerSettings

CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 5.0
HEALTH_CHECK_S = 15  # a connection idle for longer is asked PING before its next use
POOL_SIZE = 1024  # the library's 100 is fewer than the slots of a large worker blocked at once

BROKER = "the broker"
NO_EVICTION = "noeviction"
OLDEST_REDIS = (7, 0)  # scripts with `#!lua flags=allow-oom`
OLDEST_VALKEY = (7, 2)


def connect(url: str) -> Redis:
    """A client for everything that answers at once: bytes replies, 5 s for a reply. Raises ConfigError."""
    with _valid(url):
        return Redis.from_url(url, retry=_no_retry(), socket_timeout=REPLY_TIMEOUT_S, **_options(url))


class PageServer(Redis):
    """A client of a page server that is not the control broker: what fails there, is told of it by name."""

    address = ""


def connect_pages(url: str, settings: BrokerSettings) -> PageServer:
    """The client for an advertised `url`, with our own credentials. As `connect` otherwise.

    Over TLS the certificate options (`ssl_*`) of `broker.url` hold here, too. Raises ConfigError.
    """
    with _valid(url):
        full = _with_credentials(url, settings)
        pool = ConnectionPool.from_url(full, retry=_no_retry(), socket_timeout=REPLY_TIMEOUT_S, **_options(url))
    client = PageServer(connection_pool=pool)
    client.auto_close_connection_pool = True  # it is nobody else's
    client.address = url
    return client


def _with_credentials(url: str, settings: BrokerSettings) -> str:
    parts = urlsplit(url)
    user, password = settings.pages_user, settings.pages_password
    login = f"{quote(user or '', safe='')}:{quote(password or '', safe='')}@" if user or password else ""
    ours = parse_qsl(urlsplit(settings.url).query)
    options = [(name, value) for name, value in ours if name.startswith("ssl_") and parts.scheme == "rediss"]
    return parts._replace(netloc=login + parts.netloc.rpartition("@")[2], query=urlencode(options)).geturl()


def connect_blocking(url: str) -> Redis:
    """A client for commands that block on purpose: no reply timeout, keepalive finds a dead peer. ConfigError."""
    with _valid(url):
        return Redis.from_url(url, retry=_no_retry(), socket_timeout=None, **_options(url))


def connect_async(url: str) -> AsyncRedis:
    """As `connect`, for asyncio. Raises ConfigError.

    RESP3 whatever the URL says: only there may one connection both subscribe and ask.
    """
    retry = AsyncRetry(NoBackoff(), 0)
    with _valid(url):
        client = AsyncRedis.from_url(url, retry=retry, socket_timeout=REPLY_TIMEOUT_S, **_options(url))
    client.connection_pool.connection_kwargs["protocol"] = 3
    return client


def _no_retry() -> Retry:
    return Retry(NoBackoff(), 0)


def _options(url: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "max_connections": POOL_SIZE,
    }
    if not url.startswith("unix:"):
        options |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    return options


def _keepalive() -> dict[int, int]:
    """A peer that vanished is noticed after about 20 s; the systems' own default is two hours."""
    options = {socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
    if sys.platform == "linux":
        options[socket.TCP_KEEPIDLE] = 5
        options[socket.TCP_USER_TIMEOUT] = 20_000  # ms: keepalive says nothing while sent bytes wait for their ACK
    elif sys.platform == "darwin":
        options[socket.TCP_KEEPALIVE] = 5
    return options


@contextmanager
def _valid(url: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"broker.url {redact(url)!r} is not a redis://, rediss:// or unix:// URL: {error}") from error


# The first that fits counts: some of these classes derive from ConnectionError.
_ADVICE: tuple[tuple[type[failures.RedisError], str], ...] = (
    (failures.AuthenticationError, "{it} refused our credentials: check user and password in {login}"),
    (failures.NoPermissionError, "{it} forbids a command to our user: extend its ACL"),
    (failures.OutOfMemoryError, "{it} is full: raise its maxmemory, or lower {budget}"),
    (failures.ReadOnlyError, "{it} is a read-only replica: point {url} at the primary"),
    (failures.TimeoutError, "{it} did not answer in time: check that it runs and is reachable"),
    (failures.ConnectionError, "{it} is unreachable: check {url} and that the server runs"),
    (failures.RedisError, "{it} refused a command: see its log"),  # MASTERDOWN, BUSY, MISCONF, CLUSTERDOWN
)
_BROKER = {"it": BROKER, "login": "broker.url", "budget": "budget_bytes", "url": "broker.url"}
_PAGES = {
    "login": "broker.pages_user and broker.pages_password",
    "budget": "pages_budget_bytes",
    "url": "the pages_url of its decode replica",
}


@contextmanager
def translate(client: Redis | None = None) -> Iterator[None]:
    """Raise what the network or the server does to us as BrokerError, saying what to do; as PageServerError where
    `client` is of one."""
    try:
        yield
    except failures.RedisError as error:
        advice = next(advice for kind, advice in _ADVICE if isinstance(error, kind))
        if isinstance(client, PageServer):
            raise PageServerError(f"{advice.format(**_PAGES, it=name_of(client))} ({error})") from error
        raise BrokerError(f"{advice.format(**_BROKER)} ({error})") from error


def name_of(client: Redis) -> str:
    """What to call a server in a message."""
    return f"page server {client.address}" if isinstance(client, PageServer) else BROKER


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself. `run_id` changes with every start; `maxmemory_bytes` 0 is unlimited."""

    kind: str  # "valkey" or "redis"
    version: tuple[int, ...]
    run_id: str
    maxmemory_bytes: int
    policy: str


def margin_bytes(budget_bytes: int) -> int:
    """Memory the server needs beyond the page budget: jobs, records, token logs, client buffers, and the one window
    (at most an eighth of the budget) that each of two fenced-off writers may still have under way."""
    return 64 * MIB + budget_bytes // 4


def server_info(client: Redis) -> ServerInfo:
    """Raises BrokerError. Uses INFO only: hosted servers often forbid CONFIG."""
    with translate(client):
        raw: dict[str, Any] = client.info()
    kind = "valkey" if "valkey_version" in raw else "redis"
    version = tuple(int(part) for part in re.findall(r"\d+", str(raw[f"{kind}_version"]))[:3])
    return ServerInfo(kind, version, str(raw["run_id"]), int(raw["maxmemory"]), str(raw["maxmemory_policy"]))


def require_ready(client: Redis, budget_bytes: int, value_bytes: int) -> ServerInfo:
    """Check that the server can hold `budget_bytes` of pages, `value_bytes` each, and never drops one by itself.

    Raises BrokerError (unreachable), BudgetTooSmallError, ConfigError (the server's version, policy or maxmemory).
    """
    if value_bytes > budget_bytes:
        raise BudgetTooSmallError(budget_bytes, value_bytes)
    info, name = server_info(client), name_of(client)
    require_version(info, name)
    require_policy(info, name)
    require_memory(info, budget_bytes, name)
    return info


def require_version(info: ServerInfo, name: str = BROKER) -> None:
    """Raises ConfigError."""
    oldest = OLDEST_VALKEY if info.kind == "valkey" else OLDEST_REDIS
    if info.version < oldest:
        raise ConfigError(f"{name} is {info.kind} {dotted(info.version)}: {dotted(oldest)} or newer is needed")


def require_policy(info: ServerInfo, name: str = BROKER) -> None:
    """Raises ConfigError."""
    if info.policy != NO_EVICTION:
        raise ConfigError(
            f"{name}'s maxmemory-policy is {info.policy}: it would drop pages by itself; "
            f"set `maxmemory-policy {NO_EVICTION}` in its configuration"
        )


def require_memory(info: ServerInfo, budget_bytes: int, name: str = BROKER) -> None:
    """Raises ConfigError."""
    needed = budget_bytes + margin_bytes(budget_bytes)
    if 0 < info.maxmemory_bytes < needed:
        budget = "broker.budget_bytes" if name == BROKER else "pages_budget_bytes"
        raise ConfigError(
            f"{name}'s maxmemory is {info.maxmemory_bytes} bytes; budget_bytes = {budget_bytes} needs {needed}: "
            f"raise maxmemory or lower {budget}"
        )


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
