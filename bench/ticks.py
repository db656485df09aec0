"""What does an engine's step cost beside the jobs that hand its tokens on, with a wake for each token and with ticks?

A stand-in for an engine whose thread launches its kernels from Python: many short calls that give the interpreter's
lock away, some milliseconds a step, and a token for each of sixteen requests at its end. The rest is real: a thread for
each job, `Ledger.emit`, a broker. `alone`: nobody takes the tokens. `a wake a token`: each is handed on when it comes.
`ticks`: as `engines/pace.py` has it, which is what vLLM's decoding does. The three take turns.

    python -m bench.ticks [--requests 16] [--steps 600] [--calls 120] [--rounds 5]
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import report
from bench.report import Target
from pipeline.broker.channel import TokenEntry
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import connect
from pipeline.broker.embedded import EmbeddedServer
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.scripts import Scripts
from pipeline.contract import Contract
from pipeline.engines.base import TokenStep
from pipeline.engines.pace import handed_on
from pipeline.handoff import Event
from pipeline.request import Request, Sampling
from pipeline.settings import MIB, BrokerSettings, Settings

ALONE, WOKEN, TICKS = "alone", "a wake a token", "ticks"
OWNER, WORKER = "bench", "d"
OF_ALONE = 1.5  # a step with ticks, of one alone
BUDGET_BYTES = 64 * MIB
WARM = 50  # steps


class Queue:
    """Steps of one request, from the engine's thread to its job's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: list[TokenStep] = []
        self._over = threading.Event()

    def put(self, step: TokenStep) -> None:
        with self._changed:
            self._steps.append(step)
            self._changed.notify_all()

    def end(self) -> None:
        self._over.set()
        with self._changed:
            self._changed.notify_all()

    def taken(self, requests: int, *, ticks: bool) -> Iterator[TokenStep]:
        if ticks:
            yield from handed_on(self._take, lambda: requests, self._over)
            return
        while steps := self._take(1):
            yield from steps

    def _take(self, most: int | None = None) -> list[TokenStep]:
        """Nothing once it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._steps or self._over.is_set())
            steps, self._steps = self._steps[:most], [] if most is None else self._steps[most:]
            return steps


class Bench:
    """Handoffs of a broker of our own, each with a job that logs its tokens."""

    def __init__(self, ledger: Ledger, scripts: Scripts, contract: Contract, options: argparse.Namespace) -> None:
        self._ledger = ledger
        self._scripts = scripts
        self._contract = contract
        self._options = options
        self._matrix: NDArray[np.float32] = np.ones((96, 96), np.float32)

    def run(self, case: str) -> float:
        """Milliseconds a step."""
        queues = [] if case == ALONE else [Queue() for _ in range(self._options.requests)]
        jobs = [
            threading.Thread(target=self._job, args=(self._begun(), queue, case == TICKS), daemon=True)
            for queue in queues
        ]
        for job in jobs:
            job.start()
        for _ in range(WARM):
            self._launch()
        start = time.monotonic()
        for number in range(self._options.steps):
            self._launch()
            for queue in queues:
                queue.put(TokenStep((number,)))
        took = time.monotonic() - start
        for queue in queues:
            queue.end()
        for job in jobs:
            job.join()
        return 1e3 * took / float(self._options.steps)

    def _launch(self) -> None:
        for _ in range(self._options.calls):
            np.dot(self._matrix, self._matrix)

    def _begun(self) -> str:
        request = Request(secrets.token_hex(16), (1, 2, 3), Sampling(max_tokens=self._options.steps))
        route = {"prefill_engine": None, "prefill_queue": None, "decode_replica": WORKER, "decode_queue": "none"}
        self._scripts.run(*self._ledger.opening(request, self._contract, route, OWNER))
        attempt, _ = self._ledger.enter(request.handoff_id, "decode", f"{WORKER}@1")
        self._ledger.advance(request.handoff_id, "decode", attempt, Event.COMMIT)
        return request.handoff_id

    def _job(self, handoff_id: str, queue: Queue, ticks: bool) -> None:
        sent = 0
        for step in queue.taken(self._options.requests, ticks=ticks):
            self._ledger.emit(handoff_id, 1, TokenEntry(sent, step.token_ids))
            sent += len(step.token_ids)


def run(options: argparse.Namespace) -> dict[str, Any]:
    contract = Contract("w", "t", "c", layers=1, kv_heads=1, head_dim=8, vocab_size=1024, context_length=2048)
    found: dict[str, list[float]] = {case: [] for case in (ALONE, WOKEN, TICKS)}
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(Path(directory), BUDGET_BYTES) as url,
        connect(url) as client,
    ):
        settings = Settings(broker=BrokerSettings(url=url))
        ledger = Ledger(client, PageServers(client, settings.broker), BrokerClock(client), settings)
        ledger.own(OWNER, 3600)
        bench = Bench(ledger, Scripts(client), contract, options)
        for _ in range(options.rounds):
            for case, taken in found.items():
                taken.append(bench.run(case))
    medians = {case: statistics.median(taken) for case, taken in found.items()}
    return {
        "question": "what an engine's step costs beside the jobs that hand its tokens on",
        "options": report.options(options),
        "rows": [{"case": case, "ms_per_step": took} for case, took in medians.items()],
        "targets": report.rows(targets(medians)),
    }


def targets(took: dict[str, float]) -> list[Target]:
    return [Target("a step with ticks, of one alone", took[TICKS] / took[ALONE], OF_ALONE, "x")]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--calls", type=int, default=120, help="of a small matrix product, in each step")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


def main() -> None:
    result = run(parse(sys.argv[1:]))
    report.table("A step", ("case", "ms"), [[row["case"], row["ms_per_step"]] for row in result["rows"]])
    report.finish("ticks", result)


if __name__ == "__main__":
    main()
