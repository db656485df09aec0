"""How long until the first token, prefilling on one engine and decoding on the other?

Prompts of several lengths; each engine alone and both directions in every round, a handoff beside the prefill engine
that it is compared with, since only ratios within a run mean anything on a shared machine. Added TTFT is the handoff
minus the prefill engine alone in the same round, by the median of those differences, minus one decode step of D, which
computes the last prompt token once more. The broker's own memory is watched all the while.

First with a checkpoint that computes next to nothing (`bench.light`), so that what is added shows; then with a real
model, whose longer prefills vary by more than a handoff adds.

    python -m bench.ttft [--seconds 270] [--lengths 51,184,744,2844] [--real-lengths 51,184,744] [--budget-mib 8]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from redis import Redis
from tokenizers import Tokenizer

from bench import ending, light, report, rounds
from bench.client import Sample, stream
from bench.fleet import fleet, versions
from bench.report import Target
from pipeline.cli.fleet import Fleet

SENTENCE = "Water evaporates and condenses. "
OUTPUT_TOKENS = 16
WARM_TOKENS = 130
FEWEST = 3  # rounds of anything
STOP_S = 8.0  # what a system needs to end
LIGHT, LIGHT_SHARE = "light", 0.4  # of the time
SHARE, FIXED_MS = 0.03, 15.0  # of the prefill engine's own, and beside it: what a handoff may add
STAGES = ("queue", "prefill", "first_page_out", "transfer", "import", "first_token")


def prompt(tokenizer: Tokenizer, trial: int, tokens: int) -> list[int]:
    """The trial's number, then one sentence over and over, exactly `tokens` ids."""
    text = f"Trial {trial:08d}: " + SENTENCE * (tokens // 4) + "Explain this process."
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids[:tokens]


def stages(trace: dict[str, Any]) -> dict[str, float]:
    """Where the time went, ms. Stages overlap: pages leave, cross and are imported while prefill runs."""
    at = trace["marks_ms"]

    def span(start: str, end: str) -> float:
        return float(at[end] - at[start]) if start in at and end in at else 0.0

    return {
        "queue": at.get("prefill_started", at.get("decode_started", 0.0)),
        "prefill": span("prefill_started", "prefill_ended"),
        "first_page_out": span("prefill_started", "first_page_out"),
        "transfer": span("first_page_out", "last_page_out"),
        "import": span("first_page_in", "last_page_in"),
        "first_token": span("committed", "first_token"),
    }


class MemoryWatch:
    """Peak of the server's used_memory over what it was before."""

    def __init__(self, url: str) -> None:
        self._client = Redis.from_url(url)
        self._done = threading.Event()
        self.baseline = self.peak = self._used()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _used(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, self._used())

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._thread.join()


def routes(engines: str) -> tuple[str, ...]:
    """Each handoff beside the prefill engine that it is compared with."""
    a, b = engines.split(",")
    return f"local:{a}", f"{a}->{b}", f"{b}->{a}", f"local:{b}"


def measure(
    client: httpx.Client, model: Path, lengths: list[int], options: argparse.Namespace, end_s: float
) -> list[Sample]:
    """Rounds over all lengths and routes until `end_s` of the monotonic clock, after a short prompt on each route for
    warming up. Every other round goes the other way round."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ways = [(length, route) for length in lengths for route in routes(options.engines)]
    trials = itertools.count(10_000 * options.seed)

    def once(length: int, route: str) -> Sample:
        return stream(client, model.name, prompt(tokenizer, next(trials), length), route, OUTPUT_TOKENS)

    for route in routes(options.engines):
        once(WARM_TOKENS, route)
    taken: list[Sample] = []
    for number in rounds.until(end_s, options.fewest):
        taken += [once(*way) for way in ways[:: -1 if number % 2 else 1]]
        print(f"{model.name}: round {number}", flush=True)
    return taken


def summary(samples: list[Sample], a: str, b: str) -> list[dict[str, Any]]:
    """One row per length and direction: medians in ms, added TTFT as a share of the prefill engine alone. Every route
    has as many samples of a length, in the order of the rounds."""

    def of(route: str, length: int) -> list[Sample]:
        return [s for s in samples if s.route == route and s.prompt_tokens == length]

    lengths = sorted({s.prompt_tokens for s in samples})
    return [
        _row(of(f"{p}->{d}", length), of(f"local:{p}", length), of(f"local:{d}", length))
        for length in lengths
        for p, d in ((a, b), (b, a))
    ]


def _row(handed: list[Sample], of_p: list[Sample], of_d: list[Sample]) -> dict[str, Any]:
    med = statistics.median
    alone, step = med([s.ttft_ms for s in of_p]), med([s.step_ms for s in of_d])
    added = med([ours.ttft_ms - own.ttft_ms for ours, own in zip(handed, of_p, strict=True)]) - step
    row = {
        "prompt_tokens": handed[0].prompt_tokens,
        "route": handed[0].route,
        "samples": len(handed),
        "prefill_alone_ms": alone,
        "decode_alone_ms": med([s.ttft_ms for s in of_d]),
        "decode_step_ms": step,
        "ttft_ms": med([s.ttft_ms for s in handed]),
        "added_ms": added,
        "added_percent": 100 * added / alone,
        "target_ms": SHARE * alone + FIXED_MS,
        "reached": added <= SHARE * alone + FIXED_MS,
        "pages": handed[0].trace["pages"],
        "bytes": handed[0].trace["bytes"],
    }
    return row | {name: med([stages(s.trace)[name] for s in handed]) for name in STAGES}


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    """Every model, length and direction."""
    return [
        Target(
            f"{row['model']}, {row['route']}, {row['prompt_tokens']} tokens: added",
            row["added_ms"],
            row["target_ms"],
            "ms",
        )
        for row in rows
    ]


class Taken(NamedTuple):
    """Of one system. `broker_bytes`: the most that its broker's memory was above what it was when idle."""

    rows: list[dict[str, Any]]
    raw: list[dict[str, Any]]
    broker_bytes: int


def sample(system: Fleet, model: Path, lengths: str, options: argparse.Namespace, end_s: float) -> Taken:
    """Against a running system with both engines, until `end_s` of the monotonic clock."""
    memory = MemoryWatch(system.settings.broker.url)
    with memory.running(), httpx.Client(base_url=system.url, timeout=600) as client:
        samples = measure(client, model, [int(n) for n in lengths.split(",")], options, end_s)
    found = [{"model": model.name, **row} for row in summary(samples, *options.engines.split(","))]
    return Taken(found, [{"model": model.name, **asdict(s)} for s in samples], memory.peak - memory.baseline)


def run(options: argparse.Namespace) -> dict[str, Any]:
    start, engines, taken = time.monotonic(), options.engines.split(","), list[Taken]()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parts = [(light.write(directory / LIGHT, light.NARROW), options.lengths, LIGHT_SHARE * options.seconds)]
        parts += [(options.model, options.real_lengths, options.seconds)] if options.real == "yes" else []
        for model, lengths, until_s in parts:
            with fleet(model, engines, directory / f"run-{model.name}", options.budget_mib) as system:
                taken.append(sample(system, model, lengths, options, start + until_s - STOP_S))
    found = [row for part in taken for row in part.rows]
    return {
        "question": "TTFT of each engine alone and of both directions",
        "options": report.options(options),
        "engines": versions(engines),
        "broker_peak_over_baseline_mib": round(max(part.broker_bytes for part in taken) / 2**20, 2),
        "took_s": round(time.monotonic() - start),
        "rows": found,
        "raw": [each for part in taken for each in part.raw],
        "targets": report.rows(targets(found)),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds.arguments(parser, 270, FEWEST)
    parser.add_argument("--lengths", default="51,184,744,2844", help="of prompts of the light model")
    parser.add_argument("--real-lengths", default="51,184,744", help="of the real one")
    parser.add_argument("--real", choices=("yes", "no"), default="yes", help="with a real model, too")
    parser.add_argument("--engines", default="vllm,mlx")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), help="the real one")
    parser.add_argument("--budget-mib", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    with ending.orderly():
        result = run(options := parse(sys.argv[1:]))
    columns = ["model", "prompt_tokens", "route", "samples", "prefill_alone_ms", "decode_alone_ms", "ttft_ms"]
    columns += ["decode_step_ms", "added_ms", "target_ms", "reached", *STAGES]
    shown = [[row[column] for column in columns] for row in result["rows"]]
    report.table("TTFT, ms (medians)", [column.removesuffix("_ms") for column in columns], shown)
    used = result["broker_peak_over_baseline_mib"]
    print(f"broker memory over its idle baseline: {used:.1f} MiB at a budget of {options.budget_mib} MiB")
    report.finish("ttft", result)


if __name__ == "__main__":
    main()
