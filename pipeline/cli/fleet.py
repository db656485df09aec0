"""Fleet: the processes of one machine, started together, watched, stopped in order: API, workers, broker.

The API goes first so that no new request arrives while workers finish; the broker goes last because all the
others end their work on it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pipeline
from pipeline.broker.embedded import EmbeddedServer
from pipeline.cli import child, config, machine
from pipeline.cli.child import Child
from pipeline.cli.client import fetch
from pipeline.errors import ConfigError, CrossfillError
from pipeline.settings import Settings, WorkerSettings

GRACE_S = 40.0  # SIGTERM to SIGKILL: longer than the API grants its running answers
API = "api"


class StartError(CrossfillError):
    """A process ended, or was not ready in time, before everything was up."""

    code = "start_failed"


class Fleet:
    """Owns every process it starts. `settings` need an `api` section and at least one worker.

    `directory` receives logs, the broker's files and the settings the children read.
    """

    def __init__(self, settings: Settings, directory: Path, environ: Mapping[str, str]) -> None:
        if settings.api is None:
            raise ConfigError("api.model: which model to serve is not set")
        if not settings.workers:
            raise ConfigError("workers: none is described; nothing could serve a prompt")
        self.settings = settings
        self.url = f"http://{_reachable(settings.api.host)}:{settings.api.port}"
        self._directory = directory
        self._file = directory / "settings.json"  # what the children read
        self._environ = environ
        self._server: EmbeddedServer | None = None
        self._api: Child | None = None
        self._workers: list[Child] = []

    @property
    def children(self) -> list[Child]:
        return [*self._workers, *([self._api] if self._api else [])]

    def start(self) -> None:
        """Broker (unless one is named by URL), then workers and API at once. Call from the main thread."""
        _require_free(self.settings)
        self._directory.mkdir(parents=True, exist_ok=True)
        if "url" not in self.settings.broker.model_fields_set:
            self._own_broker()
        config.save(self.settings, self._file)
        for worker in self.settings.workers:
            self._workers.append(self._start_worker(worker))
        self._api = self._start_api()

    def restart(self, each: Child) -> Child:
        """Start a child that has ended once more; its log begins anew."""
        if each is self._api:
            self._api = self._start_api()
            return self._api
        worker = next(worker for worker in self.settings.workers if worker.name == each.name)
        started = self._start_worker(worker)
        self._workers = [started if other is each else other for other in self._workers]
        return started

    def _own_broker(self) -> None:
        broker = self.settings.broker
        self._server = EmbeddedServer(self._directory / "broker", broker.budget_bytes)
        broker = broker.model_copy(update={"url": self._server.start()})
        self.settings = self.settings.model_copy(update={"broker": broker})

    def _start_api(self) -> Child:
        return self._spawn(API, Path(sys.executable), ["serve"], {})

    def _start_worker(self, worker: WorkerSettings) -> Child:
        python = worker.python or Path(sys.executable)
        if not python.exists():
            raise ConfigError(f"workers: {worker.name}: python = {python} does not exist")
        extra = machine.environment(worker, sys.platform)
        return self._spawn(worker.name, python, ["worker", "--name", worker.name], extra)

    def _spawn(self, name: str, python: Path, command: list[str], extra: Mapping[str, str]) -> Child:
        parent = ["--parent", str(os.getpid())]
        argv = [str(python), "-m", "pipeline", command[0], "--config", str(self._file), *command[1:], *parent]
        env = {**self._environ, **_import_path(self._environ), "PYTHONUNBUFFERED": "1", **extra}
        return Child(name, argv, env, self._directory / f"{name}.log")

    def wait_ready(self, timeout_s: float) -> Iterator[dict[str, bool]]:
        """Yields name -> ready while anything is not, about twice a second. Raises StartError."""
        deadline = time.monotonic() + timeout_s
        while True:
            if dead := self.dead():
                raise StartError(dead[0].epitaph())
            ready = self.ready()
            yield ready
            if all(ready.values()):
                return
            if time.monotonic() > deadline:
                late = next(c for c in self.children if not ready[c.name])
                raise StartError(
                    f"{late.name} not ready after {timeout_s:.0f} s; the end of {late.log}:\n{late.tail()}"
                )
            time.sleep(0.5)

    def ready(self) -> dict[str, bool]:
        """Which children serve: workers that the registry lists, and the API once it says so itself."""
        status = fetch(f"{self.url}/status")
        alive = {replica["name"] for replica in status["replicas"]} if status else set()
        ready = {worker.name: worker.name in alive for worker in self._workers}
        return ready | {API: all(ready.values()) and fetch(f"{self.url}/ready") is not None}

    def dead(self) -> list[Child]:
        return [each for each in self.children if each.status is not None]

    def bury(self, each: Child) -> None:
        """Stop counting a worker that has ended."""
        self._workers.remove(each)

    @property
    def serves(self) -> bool:
        """The API and at least one worker still run."""
        return self._api is not None and self._api.status is None and any(w.status is None for w in self._workers)

    def stop(self, grace_s: float = GRACE_S) -> list[str]:
        """Stop all in order; the names of those that had to be killed. Idempotent."""
        late = child.stop([self._api] if self._api else [], grace_s)
        late += child.stop(self._workers, grace_s)
        if self._server:
            self._server.stop()
        self._server, self._api, self._workers = None, None, []
        return [each.name for each in late]


def _require_free(settings: Settings) -> None:
    """Another server on our port would answer our probes. Raises ConfigError."""
    assert settings.api is not None
    address = (settings.api.host, settings.api.port)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what the API's own socket does
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(f"api.port: cannot listen on {address[0]}:{address[1]}: {error.strerror}") from error


def _reachable(host: str) -> str:
    """An address to connect to, for an address to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)


def _import_path(environ: Mapping[str, str]) -> dict[str, str]:
    """A checkout is put on the path of every environment; an installed package is installed in each of them."""
    root = Path(pipeline.__file__).resolve().parent.parent
    if not (root / "pyproject.toml").exists():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), environ.get("PYTHONPATH", "")]))}
