"""What does the HTTP edge cost, per request and per streamed token, and do 200 streams on one process stall?

The API is the real one, `crossfill serve` against a real broker. The decode worker is a player in this process: it
takes the jobs off the queue and emits tokens through the ledger at a given pace, so no engine competes for the CPU.
Counted is the API process's own CPU time (Linux: `/proc`), less what it uses while idle.

    python -m bench.api [--model models/smollm2-135m] [--requests 300] [--streams 200] [--tokens 100] [--rate 8]
                        [--vllm-url URL --vllm-pid PID]   # the same clients against vLLM's own server
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis

from bench import report
from bench.fleet import free_port
from bench.process import cpu_s
from pipeline import checkpoint
from pipeline.broker.channel import TokenEntry
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import connect
from pipeline.broker.embedded import EmbeddedServer
from pipeline.broker.job import open_queue
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.registry import Registry, Replica
from pipeline.cli import child as children
from pipeline.cli.child import Child
from pipeline.cli.client import fetch
from pipeline.errors import CrossfillError
from pipeline.handoff import Event
from pipeline.settings import BrokerSettings, Settings

PROMPT = "Water evaporates and condenses. " * 12
TEXT_IDS = tuple(range(300, 700))  # ordinary words of any of our vocabularies
BUDGET_BYTES = 64 << 20


class Turn(NamedTuple):
    """When a handoff's next token is due (monotonic seconds), and how far it has come."""

    due: float
    handoff_id: str
    attempt: int
    told: int
    total: int


class Player(threading.Thread):
    """Plays a decode worker: one token of each handoff every `1 / rate` seconds; `rate` 0 all at once."""

    def __init__(self, client: Redis, settings: Settings, contract: Any) -> None:
        super().__init__(daemon=True)
        self.rate = 0.0
        self.stopping = False
        self._client = client
        self._ledger = Ledger(client, PageServers(client, settings.broker), BrokerClock(client), settings)
        self._queue = open_queue(client, "decode.player")
        replica = Replica(
            "player", "reference", "decode", "bench", contract, slots=1024, started_ms=0, max_running=1024
        )
        self._registry = Registry(client)
        self._registry.register(replica, 3600)

    def run(self) -> None:
        turns: list[Turn] = []
        while not self.stopping:
            now = time.monotonic()
            for job in self._queue.get_jobs(0, 64):
                self._queue.remove(job)
                job.delete()
                heapq.heappush(turns, self._begin(str(job.args[0]), now))
            while turns and turns[0].due <= now:
                if (following := self._play(heapq.heappop(turns))) is not None:
                    heapq.heappush(turns, following)
            time.sleep(0.002)

    def _begin(self, handoff_id: str, now: float) -> Turn:
        attempt, record = self._ledger.enter(handoff_id, "decode", f"player@{self._registry.incarnation}")
        self._ledger.advance(handoff_id, "decode", attempt, Event.COMMIT)
        return Turn(now, handoff_id, attempt, 0, record.request.sampling.max_tokens)

    def _play(self, turn: Turn) -> Turn | None:
        last = turn.told + 1 == turn.total
        token_id = TEXT_IDS[turn.told % len(TEXT_IDS)]
        entry = TokenEntry(turn.told, (token_id,), "length" if last else None, held_tokens=0 if last else None)
        try:
            self._ledger.emit(turn.handoff_id, turn.attempt, entry)
            if last:
                self._ledger.leave(turn.handoff_id, "decode", turn.attempt)
        except CrossfillError:
            return None
        step = 1 / self.rate if self.rate else 0.0
        return None if last else turn._replace(due=turn.due + step, told=turn.told + 1)


async def post(url: str, body: dict[str, Any]) -> list[float]:
    """One request on its own connection, read as it comes: when each piece of the body arrived, monotonic seconds."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read()).decode(errors="replace")[:500])
    times = []
    while line := await reader.readline():
        if line.startswith((b"data: {", b"{")):
            times.append(time.monotonic())
    writer.close()
    return times


def body(model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": tokens, "stream": stream, "ignore_eos": True}


async def many(url: str, count: int, at_once: int, asked: dict[str, Any]) -> list[list[float]]:
    gate = asyncio.Semaphore(at_once)

    async def one() -> list[float]:
        async with gate:
            return await post(url, asked)

    return await asyncio.gather(*(one() for _ in range(count)))


def measure(url: str, pid: int, model: str, options: argparse.Namespace, player: Player | None) -> dict[str, Any]:
    """CPU per request and per token, and the silences in the streams."""
    asyncio.run(many(url, 20, 4, body(model, 1, stream=False)))  # warm
    start = cpu_s(pid)
    time.sleep(options.idle_s)
    idle = (cpu_s(pid) - start) / options.idle_s

    def spent(count: int, at_once: int, asked: dict[str, Any]) -> tuple[float, float, list[list[float]]]:
        before, began = cpu_s(pid), time.monotonic()
        times = asyncio.run(many(url, count, at_once, asked))
        took = time.monotonic() - began
        return cpu_s(pid) - before - idle * took, took, times

    request, _, _ = spent(options.requests, 8, body(model, 1, stream=False))
    per_request = request / options.requests
    if player:
        player.rate = options.rate
    stream, took, times = spent(options.streams, options.streams, body(model, options.tokens, stream=True))
    told = sum(len(each) for each in times)
    gaps = sorted(b - a for each in times for a, b in pairwise(each))
    return {
        "idle_cpu": idle,
        "request_cpu_ms": per_request * 1e3,
        "token_cpu_us": (stream - options.streams * per_request) / told * 1e6,
        "tokens_per_s": told / took,
        "api_cpu_share": stream / took,
        "gap_median_ms": statistics.median(gaps) * 1e3,
        "gap_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        "gap_max_ms": gaps[-1] * 1e3,
    }


@contextmanager
def api(model: Path, broker: str, directory: Path) -> Iterator[tuple[str, int]]:
    """URL and process id of a running API."""
    port = free_port()
    argv = [sys.executable, "-m", "pipeline", "serve", "--broker", broker, "--model", str(model), "--port", str(port)]
    child = Child(
        "api", argv, {**os.environ, "CROSSFILL_BROKER__BUDGET_BYTES": str(BUDGET_BYTES)}, directory / "api.log"
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while fetch(f"{url}/version") is None:
            if child.status is not None:
                raise RuntimeError(child.epitaph())
            time.sleep(0.2)
        yield url, child.pid
    finally:
        children.stop([child], 10)


def run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """A row for ours, and one for vLLM's own server where one was named."""
    contract = checkpoint.read_contract(options.model)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name, EmbeddedServer(Path(name) / "broker", BUDGET_BYTES) as broker:
        settings = Settings(broker=BrokerSettings(url=broker, budget_bytes=BUDGET_BYTES))
        client = connect(broker)
        player = Player(client, settings, contract)
        player.start()
        try:
            with api(options.model, broker, Path(name)) as (url, pid):
                rows["crossfill"] = measure(url, pid, options.model.name, options, player)
        finally:
            player.stopping = True
            player.join()
            client.close()
    if options.vllm_url:
        rows["vllm"] = measure(options.vllm_url, options.vllm_pid, options.vllm_model, options, None)
    return rows


def main() -> None:
    options = parse(sys.argv[1:])
    rows = run(options)
    columns = ["server", *next(iter(rows.values()))]
    report.table("The HTTP edge", columns, [[name, *row.values()] for name, row in rows.items()])
    print("written:", report.save("api", {"options": report.options(options), "rows": rows}))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rate", type=float, default=8.0, help="tokens a second of each stream")
    parser.add_argument("--idle-s", type=float, default=3.0, help="how long it is watched doing nothing")
    parser.add_argument("--vllm-url", help="vLLM's own server, for the same requests")
    parser.add_argument("--vllm-pid", type=int, help="its API process")
    parser.add_argument("--vllm-model", default="models/smollm2-135m", help="the model's name there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
