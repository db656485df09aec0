"""Peer: how others move pages, measured as `bench.stream` measures ours. Runs in `.venv-bench` (`make env-bench`).

One JSON task a line on the standard input, one JSON result a line on the standard output. Knows nothing of Crossfill.

`xoscar` is the actor RPC that Xinference uses: a page a call with eight calls under way, or, as its own KV transfer
does, sixteen pages a call, pulled by the receiver, one call after another. LMCache is its native Redis client alone
(the C++ threads that its RESP connector drives), which needs no CUDA: SET, then GET and DEL by the receiver, who is
told the keys for nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import select
import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.pair import Pair, Sides

DEPTH = 8
PULLED = 16  # pages a call
WINDOW = 32  # pages on the server at most
THREADS = 8  # of LMCache's client, its own default
BATCH = 4


@dataclass(frozen=True, slots=True)
class Task:
    """`pages` pages of `page_bytes` through the server at `url`, where one is needed."""

    transport: str
    url: str
    pages: int
    page_bytes: int
    seed: int

    @property
    def total_bytes(self) -> int:
        return self.pages * self.page_bytes

    def arrays(self, pages: int = 1) -> list[Any]:
        rng = np.random.default_rng(self.seed)
        return [rng.standard_normal(pages * self.page_bytes // 2).astype(np.float16) for _ in range(8)]


def push_send(task: Task, peer: Any) -> Generator[None, None, int]:
    import xoscar

    address, arrays = peer.recv(), task.arrays()
    yield
    asyncio.run(_push(xoscar, address, task, arrays))
    return task.total_bytes


async def _push(xoscar: Any, address: str, task: Task, arrays: list[Any]) -> None:
    """As many calls as DEPTH under way."""
    sink = await xoscar.actor_ref(address=address, uid="bench")  # measured too: until then the other side's loop rests
    calls: set[Any] = set()
    for index in range(task.pages):
        if len(calls) >= DEPTH:
            _, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        calls.add(asyncio.ensure_future(sink.put(arrays[index % len(arrays)])))
    await asyncio.gather(*calls)


def push_receive(task: Task, peer: Any) -> Generator[None, None, int]:
    import xoscar

    class Sink(xoscar.Actor):  # type: ignore[misc]
        got = 0

        async def put(self, array: Any) -> None:
            self.got += array.nbytes

        async def total(self) -> int:
            return self.got

    with asyncio.Runner() as runner:
        pool, sink = runner.run(_host(xoscar, peer, Sink))
        yield
        got = runner.run(_received(sink, task))
        runner.run(pool.stop())
    return got


async def _received(sink: Any, task: Task) -> int:
    while (got := await sink.total()) < task.total_bytes:
        await asyncio.sleep(0.001)
    return int(got)


def pull_send(task: Task, peer: Any) -> Generator[None, None, int]:
    import xoscar

    arrays = task.arrays(PULLED)

    class Source(xoscar.Actor):  # type: ignore[misc]
        async def pull(self, number: int, pages: int) -> Any:
            return arrays[number % len(arrays)][: pages * task.page_bytes // 2]

    with asyncio.Runner() as runner:
        pool, _ = runner.run(_host(xoscar, peer, Source))
        yield
        runner.run(_until_told(peer))
        runner.run(pool.stop())
    return task.total_bytes


def pull_receive(task: Task, peer: Any) -> Generator[None, None, int]:
    import xoscar

    address = peer.recv()
    yield
    got = asyncio.run(_pull(xoscar, address, task))
    peer.send("done")
    return got


async def _pull(xoscar: Any, address: str, task: Task) -> int:
    source, got = await xoscar.actor_ref(address=address, uid="bench"), 0
    for number, first in enumerate(range(0, task.pages, PULLED)):
        got += (await source.pull(number, min(PULLED, task.pages - first))).nbytes
    return got


async def _host(xoscar: Any, peer: Any, actor: Any) -> tuple[Any, Any]:
    """A pool of this process alone with one actor in it; the other side is told where."""
    pool = await xoscar.create_actor_pool(address="127.0.0.1", n_process=0)
    ref = await xoscar.create_actor(actor, uid="bench", address=pool.external_address)
    peer.send(pool.external_address)
    return pool, ref


async def _until_told(peer: Any) -> None:
    """Without a thread of its own: the pool's loop runs on."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(peer.fileno(), told.set)
    await told.wait()
    loop.remove_reader(peer.fileno())
    peer.recv()


class _Lmcache:
    """Its client with one batch under way."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._client = _native("lmcache_redis").LMCacheRedisClient(address.hostname, address.port, THREADS)
        self._ready = select.poll()
        self._ready.register(self._client.event_fd(), select.POLLIN)

    def run(self, verb: str, keys: Sequence[str], *buffers: Any) -> None:
        getattr(self._client, f"submit_batch_{verb}")(list(keys), *buffers)
        done: list[Any] = []
        while not done:
            self._ready.poll(1000)
            done = self._client.drain_completions()
        for _, good, why, _ in done:
            if not good:
                raise RuntimeError(f"LMCache: {verb}: {why}")

    def close(self) -> None:
        self._client.close()


def _native(name: str) -> Any:
    """An extension module of LMCache without its package, which asks for CUDA. It wants PyTorch's libraries loaded."""
    import torch  # noqa: F401

    package = importlib.util.find_spec("lmcache")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = next(Path(package.submodule_search_locations[0]).glob(f"{name}.*.so"))
    spec = importlib.util.spec_from_file_location(f"lmcache.{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _batches(task: Task) -> list[list[str]]:
    return [[f"bench:{i}" for i in range(at, min(at + BATCH, task.pages))] for at in range(0, task.pages, BATCH)]


def lmcache_send(task: Task, peer: Any) -> Generator[None, None, int]:
    arrays, client = [array.view(np.uint8) for array in task.arrays()], _Lmcache(task.url)
    yield
    under_way = 0
    for keys in _batches(task):
        while under_way > WINDOW - BATCH:
            under_way -= peer.recv()
        client.run("set", keys, [memoryview(arrays[i % len(arrays)]) for i in range(len(keys))])
        peer.send(keys)
        under_way += len(keys)
    while under_way:
        under_way -= peer.recv()
    client.close()
    return task.total_bytes


def lmcache_receive(task: Task, peer: Any) -> Generator[None, None, int]:
    buffers, client = [memoryview(bytearray(task.page_bytes)) for _ in range(BATCH)], _Lmcache(task.url)
    yield
    got = 0
    while got < task.total_bytes:
        keys = peer.recv()
        client.run("get", keys, buffers[: len(keys)])
        client.run("delete", keys)
        peer.send(len(keys))
        got += len(keys) * task.page_bytes
    client.close()
    return got


TRANSPORTS: dict[str, Sides] = {
    "xoscar, a page a call": (push_send, push_receive),
    "xoscar, 16 pages a call": (pull_send, pull_receive),
    "LMCache's Redis client": (lmcache_send, lmcache_receive),
}


def main() -> None:
    with Pair() as pair:
        for line in sys.stdin:
            task = Task(**json.loads(line))
            measured = pair.measure(task.transport, TRANSPORTS[task.transport], task)
            print(json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    main()
