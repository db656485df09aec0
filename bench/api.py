"""What does the HTTP edge cost, per request and per streamed token, and do 200 streams on one process stall?

The API is the real one, `crossfill serve` against a real broker. Its decode worker is a player in this process: it
takes the jobs off the queue and emits tokens through the ledger at a given pace, so no engine competes for the CPU.
Beside it in the same run, in turns: the floor, an application that does nothing (`bench.floor`); and with `--engine
vllm` Crossfill decoding on vLLM and vLLM's own server (`bench.own`), both on the same model with the same settings.
Counted is the CPU time of the process that speaks HTTP (Linux: `/proc`), less what it uses while idle. A token's is
that of the time in which all streams run and none begins or ends; where there is no such time, what is left of all
streams' when each request's own is taken off.

    python -m bench.api [--model models/smollm2-135m] [--requests 100] [--streams 200] [--tokens 40] [--rate 8]
                        [--rounds 3] [--engine vllm] [--running 16]
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis

from bench import ending, own, report
from bench.fleet import fleet, free_port
from bench.process import cpu_s
from bench.report import Target
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
from pipeline.errors import CrossfillError
from pipeline.handoff import Event
from pipeline.settings import BrokerSettings, Settings

PROMPT = "Water evaporates and condenses. " * 12
TEXT_IDS = tuple(range(300, 700))  # ordinary words of any of our vocabularies
BUDGET_BYTES = 64 << 20
REQUEST_MS, TOKEN_US = 2.0, 50.0  # what one request and one token may cost
WATCH_S = 0.1
STEADY_S = 2.0
AT_ONCE = 8  # requests of one token each that are under way


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

    def stop(self) -> None:
        self.stopping = True

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


@dataclass
class Server:
    """One that is measured: where it answers, the process that speaks HTTP, and what it has cost in each round."""

    url: str
    pid: int
    model: str
    streams: int
    player: Player | None = None
    idle_cpu: float = 0.0
    rounds: list[dict[str, float]] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def warm(server: Server, idle_s: float) -> None:
    """First requests load what later ones have; then what it uses while nobody asks is measured."""
    asyncio.run(many(server.url, 5 * AT_ONCE, AT_ONCE, body(server.model, 1, stream=False)))
    start = cpu_s(server.pid)
    time.sleep(idle_s)
    server.idle_cpu = (cpu_s(server.pid) - start) / idle_s


def measure(server: Server, options: argparse.Namespace) -> None:
    """One round: requests of one token, then as many streams as the server takes at once."""
    if server.player:
        server.player.rate = 0.0
    request_s, _, _ = _spent(server, options.requests, AT_ONCE, body(server.model, 1, stream=False))
    per_request = request_s / options.requests
    if server.player:
        server.player.rate = options.rate
    asked = body(server.model, options.tokens, stream=True)
    began = time.monotonic()
    with Watch(server.pid) as watch:
        stream_s, took, times = _spent(server, server.streams, server.streams, asked)
    told = sum(len(each) for each in times)
    steady = watch.per_token_s(times, server.idle_cpu)
    server.gaps_s += [b - a for each in times for a, b in pairwise(each)]
    server.rounds.append(
        {
            "request_cpu_ms": per_request * 1e3,
            "token_cpu_us": (steady or (stream_s - server.streams * per_request) / told) * 1e6,
            "tokens_per_s": told / took,
            "api_cpu_share": stream_s / took,
            "ttft_ms": statistics.median(each[0] - began for each in times) * 1e3,
        }
    )


class Watch(threading.Thread):
    """Reads a process's CPU time again and again, so that its cost while all streams run can be told from the rest."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self._seen: list[tuple[float, float]] = []  # when, and CPU seconds by then

    def run(self) -> None:
        while not self._ended.wait(WATCH_S):
            self._seen.append((time.monotonic(), cpu_s(self._pid)))

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def per_token_s(self, times: Sequence[Sequence[float]], idle_cpu: float) -> float | None:
        """CPU of a token between the last stream's first one and the first stream's last. None: too short a while."""
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        within = [seen for seen in self._seen if begin <= seen[0] <= end]
        if len(within) < 2 or within[-1][0] - within[0][0] < STEADY_S:
            return None
        (start, before), (stop, after) = within[0], within[-1]
        told = sum(start < moment <= stop for each in times for moment in each)
        return (after - before - idle_cpu * (stop - start)) / told


def _spent(server: Server, count: int, at_once: int, asked: dict[str, Any]) -> tuple[float, float, list[list[float]]]:
    """CPU seconds, wall seconds, and when the pieces of each answer came."""
    before, began = cpu_s(server.pid), time.monotonic()
    times = asyncio.run(many(server.url, count, at_once, asked))
    took = time.monotonic() - began
    return cpu_s(server.pid) - before - server.idle_cpu * took, took, times


def summary(server: Server) -> dict[str, Any]:
    """Medians over the rounds; gaps over all of them."""
    gaps = sorted(server.gaps_s)
    names = server.rounds[0]
    return {
        "streams": server.streams,
        "idle_cpu": server.idle_cpu,
        **{name: statistics.median(each[name] for each in server.rounds) for name in names},
        "gap_median_ms": statistics.median(gaps) * 1e3,
        "gap_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        "gap_max_ms": gaps[-1] * 1e3,
    }


def targets(rows: dict[str, dict[str, Any]]) -> list[Target]:
    """What is to be reached, and what an edge that does nothing takes of it on the same machine."""
    ours, floor = rows["crossfill"], rows["floor"]
    found = [
        Target("CPU of a request", ours["request_cpu_ms"], REQUEST_MS, "ms"),
        Target("CPU of a streamed token", ours["token_cpu_us"], TOKEN_US, "us"),
        Target("the same, of a server that does nothing", floor["token_cpu_us"], TOKEN_US, "us"),
    ]
    if "vllm" in rows:
        beside = rows["crossfill on vllm"]
        for name, what in (("request_cpu_ms", "a request"), ("token_cpu_us", "a streamed token")):
            found.append(Target(f"CPU of {what}, of vLLM's own server", beside[name] / rows["vllm"][name], 1.0, "x"))
    return found


@contextmanager
def process(name: str, argv: Sequence[str], url: str, directory: Path) -> Iterator[int]:
    """Process id of a server that answers under `url`."""
    environment = {**os.environ, "CROSSFILL_BROKER__BUDGET_BYTES": str(BUDGET_BYTES)}
    child = Child(name, [sys.executable, "-m", *argv], environment, directory / f"{name}.log")
    try:
        while not asyncio.run(_answers(url)):
            if child.status is not None:
                raise RuntimeError(child.epitaph())
            time.sleep(0.2)
        yield child.pid
    finally:
        children.stop([child], 10)


async def _answers(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


@contextmanager
def played(options: argparse.Namespace, directory: Path) -> Iterator[dict[str, Server]]:
    """The floor, and our API before a player."""
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedServer(directory / "broker", BUDGET_BYTES))
        settings = Settings(broker=BrokerSettings(url=broker, budget_bytes=BUDGET_BYTES))
        client = connect(broker)
        stack.callback(client.close)
        player = Player(client, settings, checkpoint.read_contract(options.model))
        player.start()
        stack.callback(player.join)
        stack.callback(player.stop)
        ports = free_port(), free_port()
        floor, api = (f"http://127.0.0.1:{port}" for port in ports)
        floor_argv = ["bench.floor", str(ports[0]), str(options.rate)]
        api_argv = ["pipeline", "serve", "--broker", broker, "--model", str(options.model), "--port", str(ports[1])]
        floor_pid = stack.enter_context(process("floor", floor_argv, floor, directory))
        api_pid = stack.enter_context(process("api", api_argv, api, directory))
        yield {
            "floor": Server(floor, floor_pid, options.model.name, options.streams),
            "crossfill": Server(api, api_pid, options.model.name, options.streams, player),
        }


@contextmanager
def beside(options: argparse.Namespace, directory: Path) -> Iterator[dict[str, Server]]:
    """Crossfill decoding on vLLM, without a handoff, and vLLM's own server."""
    with ExitStack() as stack:
        system = stack.enter_context(fleet(options.model, ["vllm"], directory / "fleet", BUDGET_BYTES >> 20))
        [api] = [child for child in system.children if child.name == "api"]
        theirs = stack.enter_context(own.server(options.model, directory))
        yield {
            "crossfill on vllm": Server(system.url, api.pid, options.model.name, options.running),
            "vllm": Server(theirs.url, theirs.api_pid, options.model.name, options.running),
        }


def run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """A row for each server. They take turns: what disturbs the machine disturbs all of them."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = stack.enter_context(played(options, Path(name)))
        if options.engine:
            servers |= stack.enter_context(beside(options, Path(name)))
        for server in servers.values():
            warm(server, options.idle_s)
        for _ in range(options.rounds):
            for server in servers.values():
                measure(server, options)
        return {name: summary(server) for name, server in servers.items()}


def main() -> None:
    options = parse(sys.argv[1:])
    with ending.orderly():
        rows = run(options)
    columns = ["server", *next(iter(rows.values()))]
    report.table("The HTTP edge", columns, [[name, *row.values()] for name, row in rows.items()])
    found = {"options": report.options(options), "rows": rows, "targets": report.rows(targets(rows))}
    report.finish("api", found)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--requests", type=int, default=100, help="of one token, in each round")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=40, help="of each stream")
    parser.add_argument("--rate", type=float, default=8.0, help="tokens a second of each stream, but for engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=3.0, help="how long each is watched doing nothing")
    parser.add_argument("--engine", choices=("vllm",), help="its own server, too, and Crossfill decoding on it")
    parser.add_argument("--running", type=int, default=own.RUNNING, help="streams of an engine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
