"""What does one request cost API and broker as the fleet, the prompt and the handoffs in flight grow?

The API's own backend on a real server, no engines: N registered replicas, prompts of L tokens, M live handoffs. Per
request (submitted, then cancelled): CPU of the API process and of the server, bytes over the network; per live
handoff the server's memory; per sweep of a janitor, with nothing to mend, CPU of both. Each table varies one thing.

    python -m bench.scale [--requests 100] [--replicas 2,10,100,1000] [--prompts 64,1024,8192] [--live 0,100,1000]
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis

from bench import ending, report
from pipeline.api.backend import BrokerBackend, BrokerSubmission
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import connect
from pipeline.broker.embedded import EmbeddedServer
from pipeline.broker.janitor import Janitor
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.registry import Registry, Replica
from pipeline.contract import Contract
from pipeline.request import Request, Sampling
from pipeline.routing import Wish
from pipeline.settings import BrokerSettings, Settings

CONTRACT = Contract("a" * 64, "b" * 64, "c" * 64, 24, 2, 64, 151_936, 32_768)
LEASE_S = 3600.0
COLUMNS = ("api_cpu_ms", "server_cpu_ms", "network_kb")


class Model(NamedTuple):
    """What the backend wants to know of a served model."""

    name: str
    contract: Contract


class Use(NamedTuple):
    """What was used up to a moment: CPU seconds of both processes, bytes through the server's sockets."""

    api_s: float
    server_s: float
    network_bytes: float

    @staticmethod
    def now(client: Redis) -> Use:
        """The question is part of the answer: a few hundred microseconds for a whole series."""
        info: dict[str, Any] = client.info("everything")
        server = info["used_cpu_user"] + info["used_cpu_sys"]
        return Use(time.process_time(), server, info["total_net_input_bytes"] + info["total_net_output_bytes"])

    def per(self, before: Use, times: int) -> dict[str, float]:
        return {
            "api_cpu_ms": 1e3 * (self.api_s - before.api_s) / times,
            "server_cpu_ms": 1e3 * (self.server_s - before.server_s) / times,
            "network_kb": (self.network_bytes - before.network_bytes) / times / 1e3,
        }


@dataclass(frozen=True, slots=True)
class Case:
    """The sizes of one measurement."""

    replicas: int = 2
    prompt_tokens: int = 64
    live: int = 0


class Site:
    """A server with replicas that only stand in the registry, and one API backend. One case each."""

    def __init__(self, url: str, case: Case) -> None:
        self._case = case
        self._settings = Settings(broker=BrokerSettings(url=url))
        self.client = connect(url)
        self.client.flushall()
        registry = Registry(self.client)
        for index in range(case.replicas):
            registry.register(_replica(index), LEASE_S)
        self._model = Model("bench", CONTRACT)
        self._backend = BrokerBackend(self._settings, [self._model])
        self._open: list[BrokerSubmission] = []

    async def measure(self, requests: int) -> dict[str, float]:
        """Medians would hide what piles up: means over `requests`, the live ones in place."""
        await self._backend.start()
        try:
            empty = self._memory()
            for _ in range(self._case.live):
                self._open.append(await self._submit())
            held = (self._memory() - empty) / self._case.live / 1e3 if self._case.live else 0.0
            await self._one()  # scripts and connections are there from here on
            before = Use.now(self.client)
            for _ in range(requests):
                await self._one()
            return Use.now(self.client).per(before, requests) | {"live_kb": held} | self._swept()
        finally:
            for submission in self._open:
                await _end(submission)
            await self._backend.close()
            self.client.close()

    async def _one(self) -> None:
        await _end(await self._submit())

    async def _submit(self) -> BrokerSubmission:
        request = Request(secrets.token_hex(16), tuple(range(self._case.prompt_tokens)), Sampling(max_tokens=16))
        return await self._backend.submit(request, Wish(), self._model)

    def _memory(self) -> float:
        info: dict[str, Any] = self.client.info("memory")
        return float(info["used_memory"])

    def _swept(self, times: int = 5) -> dict[str, float]:
        clock = BrokerClock(self.client)
        ledger = Ledger(self.client, PageServers(self.client, self._settings.broker), clock, self._settings)
        janitor = Janitor(self.client, self.client, ledger, Registry(self.client), clock, self._settings)
        janitor.sweep()
        before = Use.now(self.client)
        for _ in range(times):
            janitor.sweep()
        used = Use.now(self.client).per(before, times)
        return {f"sweep_{name}": value for name, value in used.items()}


async def _end(submission: BrokerSubmission) -> None:
    await submission.cancel("bench")
    await submission.close()


def _replica(index: int) -> Replica:
    role = "prefill" if index % 2 else "decode"
    engine = "vllm" if index % 2 else "mlx"
    return Replica(f"{engine}-{index}", engine, role, "bench", CONTRACT, slots=16, started_ms=0)


def run(url: str, case: Case, requests: int) -> dict[str, float]:
    return asyncio.run(Site(url, case).measure(requests))


def series(url: str, name: str, values: Sequence[int], requests: int) -> list[dict[str, Any]]:
    """One row per value of `name`."""
    rows = []
    for value in values:
        case = replace(Case(), **{name: value})
        rows.append({name: value} | run(url, case, requests))
        print(f"{name} {value}: done", flush=True)
    columns = list(rows[0])
    report.table(f"per request, by {name}", columns, [[row[column] for column in columns] for row in rows])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--replicas", default="2,10,100,1000")
    parser.add_argument("--prompts", default="64,1024,8192")
    parser.add_argument("--live", default="0,100,1000")
    options = parser.parse_args()
    asked = {"replicas": options.replicas, "prompt_tokens": options.prompts, "live": options.live}
    with (
        ending.orderly(),
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(Path(directory), 256 << 20) as url,
    ):
        tables = {
            name: series(url, name, [int(v) for v in values.split(",")], options.requests)
            for name, values in asked.items()
        }
    asked_for = report.options(options)  # no draw in it: prompts are counted numbers
    result = {"question": "cost of one request at scale", "options": asked_for, "tables": tables}
    print("written:", report.save("scale", result))


if __name__ == "__main__":
    main()
