"""Many clients at once: how fast do tokens come, and how far is that from the decode engine with every prompt cached?

C clients, each sending its next prompt as soon as the last one's answer is there. Prompt lengths are uniform between
two bounds, half of the prompts begin with a prefix that an earlier one had (as many tokens as half of it). The same
prompts go over the handoff route, then over the decode engine alone after one pass that has cached them all there:
no prefill is left to do in that second run, so its tokens/s is the most that D can give. Target: >= 0.9 of it at 16.
Goodput counts answers whose TTFT and time per token stay within the given bounds.

    python -m bench.load [--clients 1,4,16] [--requests 32] [--prompts 64,512] [--answer 64] [--engines vllm,mlx]
"""

from __future__ import annotations

import argparse
import random
import statistics
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
from bench.ttft import prompt

COLUMNS = ("clients", "route", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p95_ms")
RATES = ("tokens_per_s", "goodput_per_s", "of_cached")


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
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p95_ms": percentile(ttft, 95),
        "ttft_p99_ms": percentile(ttft, 99),
        "tpot_p50_ms": percentile(tpot, 50),
        "tpot_p95_ms": percentile(tpot, 95),
        "tokens_per_s": sum(s.tokens for s in samples) / seconds,
        "goodput_per_s": good / seconds,
    }


def percentile(values: list[float], percent: int) -> float:
    """By linear interpolation, the ends included."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompts", default="64,512")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--engines", default="vllm,mlx")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--ttft-ms", type=float, default=5000.0)
    parser.add_argument("--tpot-ms", type=float, default=500.0)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    options = parser.parse_args()
    p, d = options.engines.split(",")
    shortest, longest = (int(n) for n in options.prompts.split(","))
    bounds = Bounds(options.ttft_ms, options.tpot_ms)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    rows = []
    with tempfile.TemporaryDirectory() as run, fleet(options.model, (p, d), Path(run), 64) as system:
        for clients in (int(n) for n in options.clients.split(",")):
            asked = prompts(tokenizer, options.requests, shortest, longest, options.seed + clients)
            runs = {}
            for name, route, salt in (
                ("handoff", f"{p}->{d}", f"handoff-{clients}"),
                ("caching", f"local:{d}", f"local-{clients}"),
                ("cached", f"local:{d}", f"local-{clients}"),
            ):
                taken = drive(system.url, options.model.name, asked, route, clients, options.answer, salt)
                runs[name] = row(*taken, clients, bounds)
                print(f"{clients} clients, {name}: {runs[name]['tokens_per_s']:.1f} tokens/s", flush=True)
            share = runs["handoff"]["tokens_per_s"] / runs["cached"]["tokens_per_s"]
            rows += [runs["handoff"] | {"of_cached": share}, runs["cached"] | {"of_cached": 1.0}]
    columns = COLUMNS + RATES
    report.table("under load", columns, [[f"{row[c]:.2f}" if c in RATES else row[c] for c in columns] for row in rows])
    asked_for = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    print("written:", report.save("load", {"question": "tokens/s under load", "options": asked_for, "rows": rows}))


if __name__ == "__main__":
    main()
