"""How fast do pages cross, against what the machine can do and what others do? Ours through a broker, plain TCP,
redis-py with the page inline in a stream, and xoscar's actor calls where `make env-bench` was run; all over TCP on the
loopback, in one run.

Sender and receiver are processes of their own, so that neither waits for the other's interpreter. CPU is that of both,
without the server. Ratios mean something, rates only on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench import ending, report
from bench.link import Link
from bench.pair import Measured, Pair, Sides
from bench.report import Target
from bench.server import server
from pipeline import codec, prefix
from pipeline.broker.connect import connect
from pipeline.broker.stream import PageReader, PageWriter, raise_fence, release
from pipeline.frame import Commit, FrameReader, FrameWriter
from pipeline.handoff import Attempts
from pipeline.page import PAGE_TOKENS, Page, PageShape
from pipeline.settings import MIB, BrokerSettings

SHAPE = PageShape(layers=24, kv_heads=2, head_dim=64)  # Qwen2.5-0.5B: 768 KiB
ATTEMPTS = Attempts(1, 1)
START = prefix.seed("d" * 64, "bench")
INLINE = "bench:inline"
ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".venv-bench/bin/python"
PEER_NAMES = ("xoscar, a page a call", "xoscar, 16 pages a call", "LMCache's Redis client")  # of bench.peer
TCP, OURS = "plain TCP", "Crossfill"
OF_TCP, OF_XOSCAR = 0.35, 4.0  # targets for ours
WINDOW = 32  # pages inline at most: what a budget would be


@dataclass(frozen=True, slots=True)
class Task:
    """What one transport has to move: `pages` pages of `shape`, the first `distinct` of them over and over."""

    url: str
    pages: int
    seed: int
    handoff_id: str
    shape: PageShape = SHAPE
    codec: str = "raw"
    source: Path | None = None  # real pages, `(n, *shape.array)` as numpy stores them; None: noise
    link: Link | None = None  # the sender is at its far end

    @property
    def total_bytes(self) -> int:
        return self.pages * self.shape.page_bytes

    @property
    def host(self) -> str:
        """Where the receiver listens."""
        return self.link.near if self.link else "127.0.0.1"

    def arrays(self) -> list[Any]:
        if self.source:
            return list(np.load(self.source))
        rng = np.random.default_rng(self.seed)
        return [rng.standard_normal(self.shape.array).astype(np.float16) for _ in range(min(self.pages, 8))]

    def addresses(self) -> tuple[list[bytes], bytes]:
        prompt = range(self.pages * PAGE_TOKENS + 1)
        return prefix.chain(START, prompt[:-1]), prefix.prompt_digest(START, prompt)


def ours_send(task: Task, _: Any) -> Generator[None, None, int]:
    arrays, settings = task.arrays(), BrokerSettings(url=task.url)
    frames = FrameWriter(task.handoff_id, ATTEMPTS, task.shape, *task.addresses(), codec=task.codec)
    with connect(task.url) as client:
        client.ping()  # as with the others, the connection is there; a worker's lasts for many handoffs
        yield
        with closing(PageWriter(client, frames, settings, _no_check)) as writer:
            writer.open()
            for index in range(task.pages):
                writer.write(Page(index, PAGE_TOKENS, arrays[index % len(arrays)]))
            writer.commit()
            return writer.bytes_written


def ours_receive(task: Task, _: Any) -> Generator[None, None, int]:
    settings, tokens = BrokerSettings(url=task.url), task.pages * PAGE_TOKENS
    taken = codec.understood(task.codec)
    frames = FrameReader(
        task.handoff_id, ATTEMPTS, task.shape, *task.addresses(), first_page=0, transfer_tokens=tokens, codecs=taken
    )
    with connect(task.url) as client:
        raise_fence(client, task.handoff_id, ATTEMPTS, settings)
        yield
        with closing(PageReader(client, frames, settings, _no_check)) as reader:
            while not isinstance(reader.read(120), Commit):
                reader.imported()
        release(client, task.handoff_id)
        return reader.bytes_read


def tcp_send(task: Task, peer: Any) -> Generator[None, None, int]:
    arrays = task.arrays()
    with socket.create_connection((task.host, peer.recv())) as to:
        yield
        for index in range(task.pages):
            to.sendall(arrays[index % len(arrays)].reshape(-1).view(np.uint8).data)
    return task.total_bytes


def tcp_receive(task: Task, peer: Any) -> Generator[None, None, int]:
    buffer, got = bytearray(task.shape.page_bytes), 0
    with socket.create_server((task.host, 0)) as listener:
        peer.send(listener.getsockname()[1])
        with listener.accept()[0] as origin:
            yield
            while count := origin.recv_into(buffer):
                got += count
    return got


def inline_send(task: Task, _: Any) -> Generator[None, None, int]:
    arrays = [array.tobytes() for array in task.arrays()]
    with connect(task.url) as client:
        client.delete(INLINE)
        yield
        for index in range(task.pages):
            while client.xlen(INLINE) >= WINDOW:
                time.sleep(0.0005)
            client.xadd(INLINE, {"page": arrays[index % len(arrays)]})
    return task.total_bytes


def inline_receive(task: Task, _: Any) -> Generator[None, None, int]:
    last, got = "0", 0
    with connect(f"{task.url}?protocol=2") as client:
        yield
        while got < task.total_bytes:
            reply: Any = client.xread({INLINE: last}, count=8, block=1000)
            for entry, fields in [found for _, entries in reply for found in entries]:
                last = entry.decode()
                got += len(fields[b"page"])
                client.xdel(INLINE, last)
    return got


TRANSPORTS: dict[str, Sides] = {
    TCP: (tcp_send, tcp_receive),
    OURS: (ours_send, ours_receive),
    "redis-py, page inline": (inline_send, inline_receive),
}


def _no_check() -> None:
    """Nobody cancels a benchmark."""


class Peers:
    """The others, in an environment of their own: a process that answers one task after another."""

    def __init__(self, python: Path = PEERS) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "bench.peer"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, name: str, task: Task) -> Measured:
        """Raises RuntimeError when it ended."""
        asked = {"transport": name, "url": task.url, "pages": task.pages, "seed": task.seed}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked | {"page_bytes": task.shape.page_bytes}) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{name}: its process ended with status {self._process.wait()}")
        return Measured(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()  # it ends with its input


def rows(runs: dict[str, list[Measured]]) -> list[dict[str, Any]]:
    """Medians per transport."""

    def rate(name: str) -> float:
        return statistics.median(run.moved_bytes / run.wall_s / 1e6 for run in runs[name])

    def cpu(name: str) -> float:
        return statistics.median(run.cpu_s / run.moved_bytes * 1e9 for run in runs[name])

    return [
        {
            "transport": name,
            "mb_per_s": round(rate(name), 1),
            "of_tcp": round(rate(name) / rate(TCP), 3),
            "cpu_s_per_gb": round(cpu(name), 3),
        }
        for name in runs
    ]


def targets(found: list[dict[str, Any]]) -> list[Target]:
    """Ours against plain TCP, and against each of the ways to use xoscar."""
    rate = {row["transport"]: row["mb_per_s"] for row in found}
    reached = [Target("throughput of pages, of plain TCP", rate[OURS] / rate[TCP], OF_TCP, "x", at_least=True)]
    for name, theirs in rate.items():
        if name.startswith("xoscar"):
            what = f"throughput of pages, of {name}"
            reached.append(Target(what, rate[OURS] / theirs, OF_XOSCAR, "x", at_least=True))
    return reached


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every transport `repeats` times, in turn, so that what disturbs the machine disturbs all."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(server(directory, 256 * MIB))
        pair = stack.enter_context(Pair())
        peers = stack.enter_context(Peers()) if options.peers == "yes" and PEERS.exists() else None
        runs: dict[str, list[Measured]] = {name: [] for name in (*TRANSPORTS, *(PEER_NAMES if peers else ()))}
        for number in range(options.repeats + 1):
            for name, measured in runs.items():
                task = Task(url, options.pages, options.seed, uuid.uuid4().hex)
                if name in TRANSPORTS:
                    taken = pair.measure(name, TRANSPORTS[name], task)
                else:
                    assert peers is not None
                    taken = peers.measure(name, task)
                measured += [taken] if number else []  # the first imports what it needs
    found = rows(runs)
    return {
        "question": "how fast pages cross, against plain TCP and others",
        "page_bytes": SHAPE.page_bytes,
        "options": report.options(options),
        "peers": {} if not peers else _pins(),
        "rows": found,
        "targets": report.rows(targets(found)),
    }


def _pins() -> dict[str, str]:
    """What the peers' environment was built from."""
    lines = (ROOT / "ops/requirements/bench.txt").read_text().splitlines()
    pins = dict(line.split("==", 1) for line in lines if "==" in line)
    return {name: pins[name] for name in ("xoscar", "lmcache", "torch")}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.stream", description=__doc__)
    parser.add_argument("--pages", type=int, default=256, help="pages of 768 KiB per transfer (default 256: 201 MB)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", choices=("yes", "no"), default="yes", help="if .venv-bench is there")
    return parser.parse_args(arguments)


def main() -> None:
    with ending.orderly():
        result = run(parse(sys.argv[1:]))
    columns = list(result["rows"][0])
    report.table("Pages over TCP on the loopback", columns, [list(map(str, row.values())) for row in result["rows"]])
    if not result["peers"]:
        print(f"without xoscar and LMCache: {PEERS.parent.parent.name} is not there, `make env-bench` builds it")
    report.finish("stream", result)


if __name__ == "__main__":
    main()
