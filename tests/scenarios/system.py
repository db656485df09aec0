"""System: a whole Crossfill in processes of its own, seen as a client and an operator see it: `/v1` and the broker."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from redis import Redis

from pipeline.cli import machine
from pipeline.cli.child import Child
from pipeline.cli.fleet import Fleet
from pipeline.settings import Settings

READY_S = 300.0
SETTLE_S = 60.0  # an upper bound for a loaded machine; the promise is 2 s plus one engine step


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish: str
    usage: dict[str, Any]
    trace: dict[str, Any]


class System:
    """`fleet` is running. Everything here goes over the network."""

    def __init__(self, fleet: Fleet) -> None:
        assert fleet.settings.api is not None
        self.fleet = fleet
        self.url = fleet.url
        self.model = fleet.settings.api.served_name or fleet.settings.api.model.name
        self.http = httpx.Client(base_url=fleet.url, timeout=300)
        self.broker = Redis.from_url(fleet.settings.broker.url)

    def close(self) -> None:
        self.http.close()
        self.broker.close()

    def complete(self, prompt: Sequence[int] | str, route: str, **body: Any) -> Answer:
        """One completion, greedy unless told otherwise, with a salt of its own unless one is given."""
        answer = self.post(prompt, route, **body)
        assert answer.status_code == 200, answer.text
        raw = answer.json()
        return Answer(raw["choices"][0]["text"], raw["choices"][0]["finish_reason"], raw["usage"], raw["crossfill"])

    def post(self, prompt: Sequence[int] | str, route: str, **body: Any) -> httpx.Response:
        payload = {
            "model": self.model,
            "prompt": list(prompt) if not isinstance(prompt, str) else prompt,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(8),
        }
        headers = {"X-Crossfill-Route": route, "X-Crossfill-Trace": "1"}
        return self.http.post("/v1/completions", json=payload | body, headers=headers)

    def child(self, name: str) -> Child:
        """The process of a replica, or `api`."""
        return next(each for each in self.fleet.children if each.name == name)

    def revive(self, name: str) -> None:
        """Start a replica's process again and wait until it serves: the dead one is listed until its lease ends."""
        assert self.child(name).join(SETTLE_S)
        before = self._started(name)
        self.fleet.restart(self.child(name))
        eventually(lambda: self._started(name) not in (None, before), READY_S)

    def _started(self, name: str) -> int | None:
        """When a replica that is listed was started, by the broker's clock."""
        return next((one["started_ms"] for one in self.status()["replicas"] if one["name"] == name), None)

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/status").json())

    def stats(self, replica: str) -> dict[str, int]:
        """Engine gauges and counters of one replica, at most a heartbeat old."""
        return dict(next(r["stats"] for r in self.status()["replicas"] if r["name"] == replica))

    def settled(self) -> dict[str, Any]:
        """Wait until nothing is in flight anywhere, then the status. Fails the test if that takes too long."""
        deadline = time.monotonic() + SETTLE_S
        while busy := self.busy():
            assert time.monotonic() < deadline, busy
            time.sleep(0.1)
        return self.status()

    def busy(self) -> dict[str, Any]:
        """What is not at rest, by name; empty when everything is."""
        status = self.status()
        found: dict[str, Any] = {"live": status["live"], "keys": self.leftovers()}
        for replica in status["replicas"]:
            gauges = {name: replica["stats"][name] for name in ("running", "held_pages")} | replica["load"]
            found[replica["name"]] = {name: value for name, value in gauges.items() if value}
        return {name: value for name, value in found.items() if value}

    def leftovers(self) -> list[str]:
        """Keys of any handoff, or of the budget while bytes are in flight."""
        names = [key.decode() for key in self.broker.scan_iter("cf:*", count=1000)]
        total = int(self.broker.get("cf:budget:total") or 0)
        return sorted(name for name in names if "{" in name) + ([f"budget total {total}"] if total else [])


def eventually(true: Callable[[], bool], timeout_s: float = SETTLE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"still not: {true}"
        time.sleep(0.1)


@contextmanager
def system(settings: dict[str, Any], directory: Path, ready_s: float = READY_S) -> Iterator[System]:
    """Start it, wait until it is ready, stop it."""
    fleet = Fleet(Settings.model_validate(settings), directory, os.environ)
    try:
        fleet.start()
        for _ in fleet.wait_ready(ready_s):
            pass
        running = System(fleet)
        yield running
        running.close()
    finally:
        killed = fleet.stop()
    assert killed == [], "a process did not end by itself"


def worker(name: str, engine: str, model: Path, role: str = "both", **settings: Any) -> dict[str, Any]:
    """Settings of one replica in the environment where its engine is installed."""
    python = machine.interpreters(Path(), Path(sys.prefix)).get(engine, Path(sys.executable))
    return {"name": name, "engine": engine, "model": model, "role": role, "python": python} | settings
