"""Many clients at once: how fast do tokens come, and how far is that from the decode engine with every prompt cached?

C clients, each sending its next prompt as soon as the last one's answer is there. Prompt lengths are uniform between
two bounds, half of the prompts begin with a prefix that an earlier one had (as many tokens as half of it). The same
prompts go four ways, one after another: over the handoff; over the prefill engine alone, one token each; over the
decode engine alone; and over it once more, now that it has cached them all. No prefill is left to do in the last, so
its tokens/s is the most that D can give; the second is what P can give. Nothing is faster than the slower of the two.
Goodput counts answers whose TTFT and time per token stay within the given bounds.

The defaults are a quarter of what the target is stated for (200-2000 and 128 tokens), so that CPUs end within minutes;
prefill and decode keep their proportion.

    python -m bench.load [--clients 1,4,16,64] [--requests 32] [--prompts 50,500] [--answer 32] [--engines vllm,mlx]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from bench import report
from bench.client import Sample, stream
from bench.fleet import fleet
from bench.report import Target
from bench.ttft import prompt
from pipeline.cli.fleet import Fleet

TIMES = tuple(f"{what}_p{percent}_ms" for what in ("ttft", "tpot") for percent in (50, 95, 99))
COLUMNS = ("clients", "case", "requests", *TIMES)
RATES = ("tokens_per_s", "goodput_per_s", "of_cached", "of_limit")
TARGET, TARGET_CLIENTS = 0.9, 16
FEWEST = 8  # requests of one client
HANDOFF, PREFILL, UNCACHED, CACHED = "handoff", "P alone, one token", "D alone", "D alone, all cached"


class Bounds(NamedTuple):
    """What a good answer keeps, ms."""

    ttft_ms: float
    tpot_ms: float


def prompts(tokenizer: Tokenizer, count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    """Seeded; every second one shares its first half with one before it."""
    draw = random.Random(seed)
    made: list[list[int]] = []
    for index in range(count):
        ids = prompt(tokenizer, 10_000 * seed + index, draw.randint(shortest, longest))
        if index % 2 and made:
            shared = draw.choice(made)[: len(ids) // 2]
            ids = shared + ids[len(shared) :]
        made.append([*ids[:-1], index])  # the last token tells them apart
    return made


def drive(
    url: str, model: str, asked: list[list[int]], route: str, clients: int, answer: int, salt: str
) -> tuple[list[Sample], float]:
    """Samples of all prompts over `clients` connections, and the seconds it took."""
    with httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=clients)) as client:

        def one(ids: list[int]) -> Sample:
            return stream(client, model, ids, route, answer, salt)

        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            samples = list(pool.map(one, asked))
        return samples, time.perf_counter() - start


def row(samples: list[Sample], seconds: float, clients: int, bounds: Bounds) -> dict[str, Any]:
    """Percentiles over the answers; rates over the whole run. Every answer has the same number of tokens."""
    ttft, tpot = [s.ttft_ms for s in samples], [s.step_ms for s in samples]
    good = sum(s.ttft_ms <= bounds.ttft_ms and s.step_ms <= bounds.tpot_ms for s in samples)
    return {
        "clients": clients,
        "route": samples[0].route,
        "requests": len(samples),
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p95_ms": percentile(ttft, 95),
        "ttft_p99_ms": percentile(ttft, 99),
        "tpot_p50_ms": percentile(tpot, 50),
        "tpot_p95_ms": percentile(tpot, 95),
        "tpot_p99_ms": percentile(tpot, 99),
        "tokens_per_s": sum(s.tokens for s in samples) / seconds,
        "goodput_per_s": good / seconds,
    }


def percentile(values: list[float], percent: int) -> float:
    """By linear interpolation, the ends included."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def compare(runs: dict[str, dict[str, Any]], answer: int) -> list[dict[str, Any]]:
    """The rows of one number of clients. `of_cached`: of D with everything cached; `of_limit`: of the slower of that
    and P, whose every request stands for `answer` tokens."""
    cached = runs[CACHED]["tokens_per_s"]
    prefilled = runs[PREFILL]["tokens_per_s"] * answer
    shares = {
        case: {"of_cached": row["tokens_per_s"] / cached, "of_limit": row["tokens_per_s"] / min(cached, prefilled)}
        for case, row in runs.items()
        if case != PREFILL  # one token a request: its tokens are not an answer's
    }
    return [{"case": case, **row, **shares.get(case, {})} for case, row in runs.items()]


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    """The target itself where TARGET_CLIENTS were measured, and the same against what P lets through."""
    found = [row for row in rows if row["case"] == HANDOFF and row["clients"] == TARGET_CLIENTS]
    return [
        Target(f"tokens/s at C={TARGET_CLIENTS}, of {what}", row[share], TARGET, "x", at_least=True)
        for row in found
        for share, what in (("of_cached", "D alone with prompts cached"), ("of_limit", "the slower of P and D alone"))
    ]


def sweep(system: Fleet, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of clients, every case."""
    p, d = options.engines.split(",")
    shortest, longest = (int(n) for n in options.prompts.split(","))
    bounds = Bounds(options.ttft_ms, options.tpot_ms)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    rows = []
    for clients in (int(n) for n in options.clients.split(",")):
        count = max(clients, FEWEST, min(options.requests, FEWEST * clients))
        asked = prompts(tokenizer, count, shortest, longest, options.seed + clients)
        runs = {}
        for case, route, answer, salt in (
            (HANDOFF, f"{p}->{d}", options.answer, f"handoff-{clients}"),
            (PREFILL, f"local:{p}", 1, f"prefill-{clients}"),
            (UNCACHED, f"local:{d}", options.answer, f"local-{clients}"),
            (CACHED, f"local:{d}", options.answer, f"local-{clients}"),
        ):
            taken = drive(system.url, options.model.name, asked, route, clients, answer, salt)
            runs[case] = row(*taken, clients, bounds)
            print(f"{clients} clients, {case}: {runs[case]['tokens_per_s']:.1f} tokens/s", flush=True)
        rows += compare(runs, options.answer)
    return rows


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--requests", type=int, default=32, help="at most, unless there are more clients")
    parser.add_argument("--prompts", default="50,500")
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--engines", default="vllm,mlx")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--ttft-ms", type=float, default=5000.0)
    parser.add_argument("--tpot-ms", type=float, default=500.0)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    engines = options.engines.split(",")
    with tempfile.TemporaryDirectory() as directory, fleet(options.model, engines, Path(directory), 64) as system:
        rows = sweep(system, options)
    asked = report.options(options)
    return {"question": "tokens/s under load", "options": asked, "rows": rows, "targets": report.rows(targets(rows))}


def main() -> None:
    result = run(parse(sys.argv[1:]))
    columns = COLUMNS + RATES
    shown = [[f"{row.get(c, 0):.2f}" if c in RATES else row[c] for c in columns] for row in result["rows"]]
    report.table("under load", columns, shown)
    report.finish("load", result)


if __name__ == "__main__":
    main()
