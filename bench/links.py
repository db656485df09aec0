"""What does a slow link cost? The prefill engine at its far end; broker, decode engine and client here.

For each link, length and direction two cases. `new`: P computes the prompt while pages leave, so the time to first
token should be the longer of prefill and transfer. `held by P`: P has just answered the same prompt, so the transfer is
all there is: the link itself is measured. And second turns of a chat, of which only the new tail moves. What the
wire takes is bytes moved / the rate of plain TCP over the same link in the same run. One decode step of D, as measured
in these very answers, is part of every bound, since D computes the last prompt token once more.

    python -m bench.links [--lengths 744] [--samples 3] [--first 2800] [--rounds 5] [--engines vllm,mlx]   # Linux, root
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import tempfile
import uuid
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from bench import link, report, stream, turns
from bench.client import Sample
from bench.client import stream as ask
from bench.fleet import fleet, versions
from bench.link import Link
from bench.pair import Pair
from bench.report import Target
from bench.stream import Task
from bench.ttft import prompt

NEW, HELD = "new", "held by P"
ANSWER = 8
SLACK, SLACK_MS = 0.10, 20.0  # over max(prefill, wire)
TURN_MS = 25.0  # over the wire time of the new tail
PROBE_PAGES = 48  # of plain TCP
BOUND = ("target_ms", "reached")
COLUMNS = ("link", "prompt_tokens", "route", "case", "megabytes", "prefill_ms", "wire_ms", "step_ms", "ttft_ms", *BOUND)
TALKED = ("link", "route", "prompt_tokens", "held_tokens", "pages", "wire_ms", "added_ms", *BOUND)


class Visit(NamedTuple):
    """One prompt over one direction: P alone and the handoff, each with the prompt new and held by P."""

    alone: Sample
    alone_held: Sample
    handed: Sample
    handed_held: Sample


def visit(client: httpx.Client, model: str, ids: list[int], p: str, d: str) -> Visit:
    salt = secrets.token_hex(8)
    alone, again = (ask(client, model, ids, f"local:{p}", ANSWER, salt) for _ in range(2))
    held = ask(client, model, ids, f"{p}->{d}", ANSWER, salt)
    return Visit(alone, again, ask(client, model, ids, f"{p}->{d}", ANSWER), held)


def rows(name: str, rate: float, visits: list[Visit]) -> list[dict[str, Any]]:
    """Both cases of one length and direction; `rate` in bytes/s. Medians."""
    cases = {
        NEW: ([each.alone for each in visits], [each.handed for each in visits]),
        HELD: ([each.alone_held for each in visits], [each.handed_held for each in visits]),
    }
    found = []
    for case, (alone, handed) in cases.items():
        moved = handed[0].trace["bytes"]
        prefill, ttft, step = _median(alone, "ttft_ms"), _median(handed, "ttft_ms"), _median(handed, "step_ms")
        wire = 1e3 * moved / rate
        bound = max(prefill, wire) * (1 + SLACK) + SLACK_MS + step
        row = {"link": name, "prompt_tokens": handed[0].prompt_tokens, "route": handed[0].route, "case": case}
        row |= {"megabytes": moved / 1e6, "prefill_ms": prefill, "wire_ms": wire, "step_ms": step, "ttft_ms": ttft}
        found.append(row | {"target_ms": bound, "reached": ttft <= bound})
    return found


def _median(samples: list[Sample], what: str) -> float:
    return float(statistics.median(getattr(sample, what) for sample in samples))


def talked(name: str, rate: float, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `turns.seconds`, with what the wire took for their tail."""
    later = []
    for row in found:
        wire = 1e3 * row["bytes"] / rate
        bound = TURN_MS + wire
        later.append({"link": name, **row, "wire_ms": wire, "target_ms": bound, "reached": row["added_ms"] <= bound})
    return later


def tcp_rate(made: Link, repeats: int = 3) -> float:
    """Bytes/s of plain TCP from the far end."""
    with Pair(made.enter) as pair:
        task = Task("", PROBE_PAGES, 0, uuid.uuid4().hex, link=made)
        runs = [pair.measure(stream.TCP, stream.TRANSPORTS[stream.TCP], task) for _ in range(repeats)]
    return statistics.median(run.moved_bytes / run.wall_s for run in runs)


def targets(crossed: list[dict[str, Any]], later: list[dict[str, Any]]) -> list[Target]:
    """Each row against its own bound: the worst of a link and case, as a share of what it may take."""
    found = []
    for name in dict.fromkeys(row["link"] for row in crossed):
        for case in (NEW, HELD):
            shares = [r["ttft_ms"] / r["target_ms"] for r in crossed if (r["link"], r["case"]) == (name, case)]
            found.append(
                Target(f"TTFT on {name}, prompt {case}, of max(prefill, wire) + 10 % + 20 ms", max(shares), 1, "x")
            )
        worst = max(row["added_ms"] - row["wire_ms"] for row in later if row["link"] == name)
        found.append(Target(f"second turn on {name}: added beside the wire time of its tail", worst, TURN_MS, "ms"))
    return found


class Bench:
    """What is asked of a running system. The links take turns, so what disturbs the machine disturbs all."""

    def __init__(self, client: httpx.Client, made: Link, options: argparse.Namespace) -> None:
        self._client = client
        self._link = made
        self._options = options
        self._tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        self._a, self._b = options.engines.split(",")

    @property
    def _directions(self) -> tuple[tuple[str, str], ...]:
        return (self._a, self._b), (self._b, self._a)

    def rates(self) -> dict[str, float]:
        found = {}
        for name, rate in link.SHAPED.items():
            self._link.reshape(rate)
            found[name] = tcp_rate(self._link)
        return found

    def warm(self) -> None:
        for p, d in self._directions:
            self._visit(0, 80, p, d)

    def crossed(self, rates: dict[str, float]) -> list[dict[str, Any]]:
        visits: dict[tuple[str, int, str, str], list[Visit]] = {}
        for trial in range(1, self._options.samples + 1):
            for name, length, (p, d) in product(link.SHAPED, self._lengths(), self._directions):
                self._link.reshape(link.SHAPED[name])
                taken = self._visit(trial, length, p, d)
                visits.setdefault((name, length, p, d), []).append(taken)
                print(f"{name} {length} {p}->{d}: {taken.handed.ttft_ms:.0f} ms", flush=True)
        return [row for (name, *_), each in visits.items() for row in rows(name, rates[name], each)]

    def later(self, rates: dict[str, float]) -> list[dict[str, Any]]:
        words = f"--held {self._options.first} --answer {ANSWER} --seed {self._options.seed}"
        chosen = turns.parse(words.split())
        chosen.engines, chosen.model = self._options.engines, self._options.model
        second = turns.Second(self._client, self._tokenizer, chosen)
        second.warm()
        second.round()
        found: dict[str, list[dict[str, Sample]]] = {name: [] for name in rates}
        for _ in range(self._options.rounds):
            for name, taken in found.items():
                self._link.reshape(link.SHAPED[name])
                taken.append(second.round())
        print("second turns are over", flush=True)
        return [
            row
            for name, taken in found.items()
            for row in talked(name, rates[name], turns.seconds(taken, self._a, self._b))
        ]

    def _lengths(self) -> list[int]:
        return [int(n) for n in self._options.lengths.split(",")]

    def _visit(self, trial: int, length: int, p: str, d: str) -> Visit:
        ids = prompt(self._tokenizer, 100 * self._options.seed + trial, length)
        return visit(self._client, self._options.model.name, ids, p, d)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Raises RuntimeError where no link can be shaped."""
    engines = options.engines.split(",")
    with (
        tempfile.TemporaryDirectory() as directory,
        link.shaped(1.25e9) as made,
        fleet(options.model, engines, Path(directory), 64, made) as system,
        httpx.Client(base_url=system.url, timeout=1800) as client,
    ):
        bench = Bench(client, made, options)
        bench.warm()
        rates = bench.rates()
        later = bench.later(rates)
        crossed = bench.crossed(rates)
    return {
        "question": "what a slow link adds",
        "options": report.options(options),
        "engines": versions(engines),
        "tcp_mb_per_s": {name: round(rate / 1e6, 1) for name, rate in rates.items()},
        "rows": crossed,
        "turns": later,
        "targets": report.rows(targets(crossed, later)),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="744")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--first", type=int, default=2800, help="tokens of the chat's first turn")
    parser.add_argument("--rounds", type=int, default=5, help="samples of its second turn on each link")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", default="vllm,mlx", help="the first one is at the far end")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    if why := link.missing():
        print(f"no shaped link can be made here, nothing is measured: {why}")
        return 0
    result = run(options)
    report.table("TTFT over slow links, ms", COLUMNS, [[row[c] for c in COLUMNS] for row in result["rows"]])
    report.table("second turns over slow links, ms", TALKED, [[row[c] for c in TALKED] for row in result["turns"]])
    report.finish("links", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
