"""Scene: one replica on a real broker, with a FakeEngine, and the API process that asks it."""

from __future__ import annotations

import secrets
from pathlib import Path

from redis import Redis

from pipeline.broker import channel, keys
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import connect
from pipeline.broker.dispatch import Dispatch
from pipeline.broker.job import text
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.registry import Registry, Replica
from pipeline.broker.scripts import Scripts
from pipeline.engines.base import EngineStats
from pipeline.handoff import State
from pipeline.request import Request, Sampling
from pipeline.routing import Route
from pipeline.settings import BrokerSettings, Role, Settings, WorkerSettings
from pipeline.workers.runtime import Runtime
from tests.stages.fake import CONTRACT, PAGE_BYTES, FakeEngine
from tests.stages.stand import eventually

NAME = "w-0"
PREFILL, DECODE = keys.prefill_queue("fake", CONTRACT.digest), keys.decode_queue(NAME)


class Engine(FakeEngine):
    """One whose gauges may be out of order."""

    gauges_error: str | None = None

    def stats(self) -> EngineStats:
        if self.gauges_error is not None:
            raise ValueError(self.gauges_error)
        return super().stats()


class Scene:
    """A broker, an engine, the replica that serves it, and an API process's ledger."""

    def __init__(
        self,
        url: str,
        client: Redis,
        *,
        role: Role = "both",
        lease_s: float = 5.0,
        payload_ttl_s: float = 30.0,
        metrics_port: int = 0,
        grace_s: float = 30.0,
        pages_url: str | None = None,
    ) -> None:
        self.url = url
        self.client = client
        self.engine = Engine()
        broker = BrokerSettings(url=url, budget_bytes=8 * PAGE_BYTES, payload_ttl_s=payload_ttl_s)
        self.settings = Settings(broker=broker)
        self.worker = WorkerSettings(
            name=NAME,
            engine="fake",
            model=Path("models/small"),
            role=role,
            slots=2,
            lease_s=lease_s,
            metrics_port=metrics_port,
            grace_s=grace_s,
            pages_url=pages_url,
        )
        self.ledger = Ledger(client, PageServers(client, self.settings.broker), BrokerClock(client), self.settings)
        self.ledger.own("api", 600)
        self._own_client = connect(url)
        self._closed = False
        self.runtime = Runtime(self.settings, self.worker, self.engine, self._own_client)

    def start(self) -> Scene:
        self.runtime.start()
        return self

    def replica(self) -> Replica | None:
        return next(iter(Registry(self.client).list()), None)

    def ask(self, *, local: bool = False) -> Request:
        """Queue the jobs of a handoff from this replica to itself; `local`: of one that is no handoff."""
        ids = tuple(int.from_bytes(secrets.token_bytes(1), "little") for _ in range(200))
        request = Request(secrets.token_hex(16), ids, Sampling(max_tokens=3, temperature=0.0))
        route = Route(None if local else "fake", None if local else PREFILL, NAME, DECODE, "fake")
        dispatch = Dispatch(self.client, self.ledger, Registry(self.client), self.settings)
        assert Scripts(self.client).run(*dispatch.opening(request, CONTRACT, route, "api", "small")) == 1
        return request

    def state(self, request: Request) -> State | None:
        seen = self.ledger.peek(request.handoff_id)
        return seen.state if seen else None

    def finish(self, request: Request) -> None:
        eventually(lambda: self.state(request) is State.FINISHED, "the end")

    def said(self, request: Request) -> tuple[int, ...]:
        raw = self.client.lrange(keys.HandoffKeys(request.handoff_id).tokens, 0, -1)
        return tuple(token for entry in map(channel.decode, raw) for token in entry.token_ids)

    def close(self) -> None:
        """Drain and withdraw, once."""
        if not self._closed:
            self._closed = True
            self.engine.set(tokens=3)
            self.runtime.close()
            self._own_client.close()

    def take(self) -> list[str]:
        """Wait until its RQ workers take jobs; their names, without the random end."""
        roles = 2 if self.worker.role == "both" else 1
        eventually(lambda: len(self.takers()) == roles, "its RQ workers")
        eventually(lambda: all(self._state(name) == b"idle" for name in self.takers()), "them waiting for jobs")
        return sorted(name.rsplit(".", 1)[0] for name in self.takers())

    def _state(self, taker: str) -> object:
        return self.client.hget(f"rq:worker:{taker}", "state")

    def takers(self) -> list[str]:
        names = self.client.smembers("rq:workers")
        return [text(name).removeprefix("rq:worker:") for name in names]
