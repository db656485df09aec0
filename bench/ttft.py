"""How long until the first token, prefilling on one engine and decoding on the other?

Prompts of 51, 184, 744 and 2844 tokens; each engine alone and both directions, interleaved within one run, since
only ratios within a run mean anything on a shared machine. Added TTFT = P/D - the prefill engine alone - one
measured decode step of D (D recomputes the last prompt token). The broker's own memory is watched all the while.

    python -m bench.ttft [--samples 5] [--lengths 51,184,744,2844] [--budget-mib 8] [--seed 0]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from redis import Redis
from tokenizers import Tokenizer

from bench import report
from bench.client import Sample, stream
from bench.fleet import fleet, versions
from bench.report import Target
from pipeline.cli.fleet import Fleet

SENTENCE = "Water evaporates and condenses. "
OUTPUT_TOKENS = 32
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


def measure(
    client: httpx.Client, model: Path, lengths: list[int], routes: list[str], samples: int, seed: int
) -> list[Sample]:
    """A warm-up for each length and route, then `samples` rounds over all of them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    taken: list[Sample] = []
    trial = 10_000 * seed
    for round_number in range(samples + 1):
        for length in lengths:
            for route in routes:
                trial += 1
                sample = stream(client, model.name, prompt(tokenizer, trial, length), route, OUTPUT_TOKENS)
                if round_number:
                    taken.append(sample)
                print(f"round {round_number} {length} {route}: {sample.ttft_ms:.0f} ms", flush=True)
    return taken


def summary(samples: list[Sample], a: str, b: str) -> list[dict[str, Any]]:
    """One row per length and direction: medians in ms, added TTFT as a share of the prefill engine alone."""

    def of(route: str, length: int) -> list[Sample]:
        return [s for s in samples if s.route == route and s.prompt_tokens == length]

    def med(values: list[float]) -> float:
        return statistics.median(values)

    rows = []
    for length in sorted({s.prompt_tokens for s in samples}):
        for p, d in ((a, b), (b, a)):
            handed = of(f"{p}->{d}", length)
            alone = med([s.ttft_ms for s in of(f"local:{p}", length)])
            step = med([s.step_ms for s in of(f"local:{d}", length)])
            ttft = med([s.ttft_ms for s in handed])
            split = {name: med([stages(s.trace)[name] for s in handed]) for name in STAGES}
            row = {
                "prompt_tokens": length,
                "route": f"{p}->{d}",
                "prefill_alone_ms": alone,
                "decode_alone_ms": med([s.ttft_ms for s in of(f"local:{d}", length)]),
                "decode_step_ms": step,
                "ttft_ms": ttft,
                "added_ms": ttft - alone - step,
                "added_percent": 100 * (ttft - alone - step) / alone,
                "target_ms": SHARE * alone + FIXED_MS,
                "reached": ttft - alone - step <= SHARE * alone + FIXED_MS,
                "pages": handed[0].trace["pages"],
                "bytes": handed[0].trace["bytes"],
            }
            rows.append(row | split)
    return rows


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    """Every length and direction."""
    return [
        Target(f"{row['route']}, {row['prompt_tokens']} tokens: added", row["added_ms"], row["target_ms"], "ms")
        for row in rows
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--lengths", default="51,184,744,2844")
    parser.add_argument("--engines", default="vllm,mlx")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--budget-mib", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def sample(system: Fleet, options: argparse.Namespace) -> dict[str, Any]:
    """Against a running system with both engines."""
    a, b = options.engines.split(",")
    lengths = [int(n) for n in options.lengths.split(",")]
    routes = [f"local:{a}", f"local:{b}", f"{a}->{b}", f"{b}->{a}"]
    memory = MemoryWatch(system.settings.broker.url)
    with memory.running(), httpx.Client(base_url=system.url, timeout=600) as client:
        samples = measure(client, options.model, lengths, routes, options.samples, options.seed)
    rows = summary(samples, a, b)
    return {
        "question": "TTFT of each engine alone and of both directions",
        "options": report.options(options),
        "engines": versions((a, b)),
        "broker_peak_over_baseline_mib": round((memory.peak - memory.baseline) / 2**20, 2),
        "rows": rows,
        "raw": [asdict(s) for s in samples],
        "targets": report.rows(targets(rows)),
    }


def main() -> None:
    options = parse(sys.argv[1:])
    engines = options.engines.split(",")
    with tempfile.TemporaryDirectory() as run, fleet(options.model, engines, Path(run), options.budget_mib) as system:
        result = sample(system, options)
    columns = ["prompt_tokens", "route", "prefill_alone_ms", "decode_alone_ms", "ttft_ms", "decode_step_ms"]
    columns += ["added_ms", "target_ms", "reached", *STAGES]
    shown = [[row[column] for column in columns] for row in result["rows"]]
    report.table("TTFT, ms (medians)", [column.removesuffix("_ms") for column in columns], shown)
    used = result["broker_peak_over_baseline_mib"]
    print(f"broker memory over its idle baseline: {used:.1f} MiB at a budget of {options.budget_mib} MiB")
    report.finish("ttft", result)


if __name__ == "__main__":
    main()
