"""A broker with a system on it, seen through `crossfill`'s own entry point: replicas, queues and handoffs by hand."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from pipeline.__main__ import main
from pipeline.broker import keys
from pipeline.broker.channel import TokenEntry
from pipeline.broker.clock import BrokerClock
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.queue import DECODE_JOB, PREFILL_JOB, JobSpec
from pipeline.broker.record import Accept
from pipeline.broker.registry import Registry, Replica
from pipeline.broker.stamp import Stamps
from pipeline.contract import Contract
from pipeline.handoff import Event
from pipeline.request import Request, Sampling
from pipeline.settings import MIB, Settings
from tests.begun import begin

CONTRACT = Contract("w" * 64, "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)
IDLE = {"running": 0, "held_pages": 0, "cached_pages": 1, "free_pages": 9}
P = Replica("vllm-0", "vllm", "both", "tiny", CONTRACT, slots=4, started_ms=0, stats=IDLE)
D = replace(P, name="mlx-0", engine="mlx")
ROUTE = {
    "prefill_engine": "vllm",
    "prefill_queue": keys.prefill_queue("vllm", CONTRACT.digest),
    "decode_engine": "mlx",
    "decode_replica": "mlx-0",
    "decode_queue": keys.decode_queue("mlx-0"),
}


class Rig:
    """Two replicas' records and as many handoffs as a test wants, without any process behind them."""

    def __init__(self, client: Redis, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.client = client
        self.url = url
        self._capsys = capsys
        self.settings = Settings()
        self.registry = Registry(client)
        self.ledger = Ledger(client, PageServers(client, self.settings.broker), BrokerClock(client), self.settings)
        self.ledger.own("api-1", 600)

    def register(self, *replicas: Replica) -> None:
        now_ms = round(BrokerClock(self.client).now_ms())
        for replica in replicas:
            self.registry.register(replace(replica, started_ms=now_ms - 5000), 600)

    def ask(self, tokens: int = 200) -> str:
        """A handoff with both of its jobs queued."""
        request = Request(secrets.token_hex(16), tuple(range(1, tokens + 1)), Sampling(max_tokens=4))

        stamps = Stamps(self.client, self.settings.broker)
        specs = [
            JobSpec(name, job, request.handoff_id, {})
            for name, job in ((ROUTE["decode_queue"], DECODE_JOB), (ROUTE["prefill_queue"], PREFILL_JOB))
        ]
        queued = [command for spec in specs for command in stamps.commands(spec)]
        begin(self.ledger, request, CONTRACT, ROUTE, "api-1", queued)
        return request.handoff_id

    def finish(self, handoff_id: str) -> None:
        """What two workers would have written."""
        at = {name: BrokerClock(self.client).now_ms() for name in ("at_first_token", "at_finished")}
        p, _ = self.ledger.enter(handoff_id, "prefill", "vllm-0@1")
        d, _ = self.ledger.enter(handoff_id, "decode", "mlx-0@1")
        self.ledger.accept(handoff_id, Accept(p, d, 0), {})
        self.ledger.advance(handoff_id, "decode", d, Event.IMPORT)
        self.ledger.advance(handoff_id, "decode", d, Event.COMMIT, {"imported_tokens": 199})
        self.ledger.leave(handoff_id, "prefill", p, fields={"prefill_replica": "vllm-0", "pages": 4, "bytes": 4 * MIB})
        self.ledger.emit(handoff_id, d, TokenEntry(0, (5, 6), finish="length", held_tokens=0), at)
        self.ledger.leave(handoff_id, "decode", d, fields={"decode_replica": "mlx-0"})

    def run(self, *argv: str) -> tuple[int, str]:
        """Exit status and what was printed, by both streams."""
        self._capsys.readouterr()
        status = main([*argv, "--broker", self.url])
        said = self._capsys.readouterr()
        return status, said.out + said.err

    def json(self, *argv: str) -> Any:
        status, said = self.run(*argv, "--json")
        assert status == 0, said
        return json.loads(said)
