"""How fast do pages cross, against what the machine can do? Ours through a broker, plain TCP, and redis-py with the
page inline in a stream; all over TCP on the loopback, in one run.

Sender and receiver are processes of their own, so that neither waits for the other's interpreter. CPU is that of both,
without the server. Ratios mean something, rates only on an idle machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from pipeline import prefix
from pipeline.broker.connect import connect
from pipeline.broker.embedded import EmbeddedServer
from pipeline.broker.stream import PageReader, PageWriter, raise_fence, release
from pipeline.frame import Commit, FrameReader, FrameWriter
from pipeline.handoff import Attempts
from pipeline.page import PAGE_TOKENS, Page, PageShape
from pipeline.settings import MIB, BrokerSettings

SHAPE = PageShape(layers=24, kv_heads=2, head_dim=64)  # Qwen2.5-0.5B: 768 KiB
ATTEMPTS = Attempts(1, 1)
START = prefix.seed("d" * 64, "bench")
INLINE = "bench:inline"
TARGET = 0.35  # of plain TCP, for ours
WINDOW = 32  # pages inline at most: what a budget would be


@dataclass(frozen=True, slots=True)
class Task:
    """What one transport has to move: `pages` pages of `shape`, the first `distinct` of them over and over."""

    url: str
    pages: int
    seed: int
    handoff_id: str
    shape: PageShape = SHAPE

    @property
    def total_bytes(self) -> int:
        return self.pages * self.shape.page_bytes

    def arrays(self) -> list[Any]:
        rng = np.random.default_rng(self.seed)
        return [rng.standard_normal(self.shape.array).astype(np.float16) for _ in range(min(self.pages, 8))]

    def addresses(self) -> tuple[list[bytes], bytes]:
        prompt = range(self.pages * PAGE_TOKENS + 1)
        return prefix.chain(START, prompt[:-1]), prefix.prompt_digest(START, prompt)


# What comes before the `yield` is not measured. Returns the bytes that were moved.
Side = Callable[[Task, Any], Generator[None, None, int]]


def ours_send(task: Task, _: Any) -> Generator[None, None, int]:
    arrays, settings = task.arrays(), BrokerSettings(url=task.url)
    frames = FrameWriter(task.handoff_id, ATTEMPTS, task.shape, *task.addresses())
    yield
    with connect(task.url) as client, closing(PageWriter(client, frames, settings, _no_check)) as writer:
        writer.open()
        for index in range(task.pages):
            writer.write(Page(index, PAGE_TOKENS, arrays[index % len(arrays)]))
        writer.commit()
        return writer.bytes_written


def ours_receive(task: Task, _: Any) -> Generator[None, None, int]:
    settings, tokens = BrokerSettings(url=task.url), task.pages * PAGE_TOKENS
    frames = FrameReader(task.handoff_id, ATTEMPTS, task.shape, *task.addresses(), first_page=0, transfer_tokens=tokens)
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
    with socket.create_connection(("127.0.0.1", peer.recv())) as to:
        yield
        for index in range(task.pages):
            to.sendall(arrays[index % len(arrays)].reshape(-1).view(np.uint8).data)
    return task.total_bytes


def tcp_receive(task: Task, peer: Any) -> Generator[None, None, int]:
    buffer, got = bytearray(task.shape.page_bytes), 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
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


TRANSPORTS: dict[str, tuple[Side, Side]] = {
    "plain TCP": (tcp_send, tcp_receive),
    "Crossfill": (ours_send, ours_receive),
    "redis-py, page inline": (inline_send, inline_receive),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One transfer, and the CPU of both sides."""

    moved_bytes: int
    wall_s: float
    cpu_s: float


def _no_check() -> None:
    """Nobody cancels a benchmark."""


def _side(name: str, which: int, task: Task, peer: Any, result: Any) -> None:
    """One side, in a process of its own: (bytes, begin, end, CPU seconds), by the host's monotonic clock."""
    steps = TRANSPORTS[name][which](task, peer)
    next(steps)
    peer.send("ready")
    peer.recv()
    begin_s, cpu_s, moved = time.monotonic(), time.process_time(), 0
    try:
        next(steps)
    except StopIteration as done:
        moved = done.value
    result.send((moved, begin_s, time.monotonic(), time.process_time() - cpu_s))


def measure(name: str, task: Task) -> Measured:
    """Move `task` by one transport. Raises RuntimeError unless every byte left and arrived."""
    context = multiprocessing.get_context("spawn")
    ends, sides = context.Pipe(), []
    for which, end in enumerate(ends):
        ours, theirs = context.Pipe()
        side = context.Process(target=_side, args=(name, which, task, end, theirs))
        side.start()
        theirs.close()
        sides.append((side, ours))
    for end in ends:
        end.close()
    results = []
    for side, ours in sides:
        try:
            results.append(ours.recv())
        except EOFError:
            raise RuntimeError(f"{name}: one side failed, see above") from None
        finally:
            side.join()
    if any(moved != task.total_bytes for moved, *_ in results):
        raise RuntimeError(f"{name}: {[moved for moved, *_ in results]} bytes of {task.total_bytes}")
    begin_s, end_s = min(r[1] for r in results), max(r[2] for r in results)
    return Measured(task.total_bytes, end_s - begin_s, sum(r[3] for r in results))


def rows(runs: dict[str, list[Measured]]) -> list[dict[str, Any]]:
    """Medians per transport, and what ours is to plain TCP beside its target."""

    def rate(name: str) -> float:
        return statistics.median(run.moved_bytes / run.wall_s / 1e6 for run in runs[name])

    def cpu(name: str) -> float:
        return statistics.median(run.cpu_s / run.moved_bytes * 1e9 for run in runs[name])

    return [
        {
            "transport": name,
            "mb_per_s": round(rate(name), 1),
            "of_tcp": round(rate(name) / rate("plain TCP"), 3),
            "target": TARGET if name == "Crossfill" else None,
            "cpu_s_per_gb": round(cpu(name), 3),
        }
        for name in runs
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every transport `repeats` times, in turn, so that what disturbs the machine disturbs all."""
    runs: dict[str, list[Measured]] = {name: [] for name in TRANSPORTS}
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory), 256 * MIB) as url:
        for _ in range(options.repeats):
            for name in TRANSPORTS:
                task = Task(url, options.pages, options.seed, uuid.uuid4().hex)
                runs[name].append(measure(name, task))
    return {
        "question": "how fast pages cross, against plain TCP",
        "page_bytes": SHAPE.page_bytes,
        "pages": options.pages,
        "repeats": options.repeats,
        "seed": options.seed,
        "rows": rows(runs),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.stream", description=__doc__)
    parser.add_argument("--pages", type=int, default=256, help="pages of 768 KiB per transfer (default 256: 201 MB)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    result = run(parse(sys.argv[1:]))
    columns = list(result["rows"][0])
    report.table("Pages over TCP on the loopback", columns, [list(map(str, row.values())) for row in result["rows"]])
    print("written:", report.save("stream", result))


if __name__ == "__main__":
    main()
