"""Many clients at once: how fast do tokens come, and how far is that from the decode engine with every prompt cached?

C clients, each sending its next prompt as soon as the last one's answer is there. Prompt lengths are uniform between
two bounds, half of the prompts begin with a prefix that an earlier one had (as many tokens as half of it). The same
prompts go over the handoff; then over the decode engine alone, which by now holds them all; over D's own
server, likewise (vLLM as D: `bench.own`); and over the prefill engine alone, one token each. No prefill is left to do
where all is cached, so that is the most that D can give; the last is what P can give. Nothing is faster than the slower
of the two. Goodput counts answers whose TTFT and time per token stay within the given bounds.

One machine plays several: D has a core of its own in every case, and P, broker, API and client share the others
(`bench.cores`). CPU per token is D's own, which a busy machine distorts least. Clients that begin at once make a wave
of prefills, so sixteen of them send four waves: with one alone, half of the time nothing is there to decode.

The defaults are a quarter of what the target is stated for (200-2000 and 128 tokens), so that CPUs end within minutes;
prefill and decode keep their proportion.

    python -m bench.load [--clients 1,4,16,64] [--requests 64] [--rounds 1] [--prompts 50,500] [--answer 32]
                         [--engines vllm,mlx] [--own yes] [--uncached no]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from bench import cores, own, report
from bench.client import Sample, stream
from bench.fleet import fleet, versions
from bench.own import Own
from bench.process import below, cpu_s
from bench.report import Target
from bench.ttft import prompt
from pipeline.cli.fleet import Fleet

TIMES = tuple(f"{what}_p{percent}_ms" for what in ("ttft", "tpot") for percent in (50, 95, 99))
COLUMNS = ("clients", "case", "requests", *TIMES)
RATES = ("tokens_per_s", "goodput_per_s", "d_cpu_ms_per_token", "of_cached", "of_cpu", "of_limit", "of_own")
TARGET, TARGET_CLIENTS = 0.9, 16
SHARES = {
    "of_own": "D's own server with prompts cached",
    "of_cached": "D alone with prompts cached",
    "of_cpu": "D alone with prompts cached, per CPU second of D",
    "of_limit": "the slower of P and D alone",
}
FEWEST = 8  # requests of one client
HANDOFF, PREFILL, UNCACHED, CACHED = "handoff", "P alone, one token", "D alone", "D alone, all cached"
OWN = "D's own server, all cached"


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


class Run(NamedTuple):
    """What one case took: every answer, the seconds in all, and CPU seconds of D's process."""

    samples: list[Sample]
    seconds: float
    d_cpu_s: float

    def __add__(self, other: Any) -> Run:
        return Run(self.samples + other.samples, self.seconds + other.seconds, self.d_cpu_s + other.d_cpu_s)


def row(run: Run, clients: int, bounds: Bounds) -> dict[str, Any]:
    """Percentiles over the answers; rates over the whole run. Every answer has the same number of tokens."""
    samples, seconds = run.samples, run.seconds
    ttft, tpot = [s.ttft_ms for s in samples], [s.step_ms for s in samples]
    good = sum(s.ttft_ms <= bounds.ttft_ms and s.step_ms <= bounds.tpot_ms for s in samples)
    tokens = sum(s.tokens for s in samples)
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
        "tokens_per_s": tokens / seconds,
        "goodput_per_s": good / seconds,
        "d_cpu_ms_per_token": 1e3 * run.d_cpu_s / tokens,
    }


def percentile(values: list[float], percent: int) -> float:
    """By linear interpolation, the ends included."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def compare(runs: dict[str, dict[str, Any]], answer: int) -> list[dict[str, Any]]:
    """The rows of one number of clients. `of_cached`: of D with everything cached; `of_limit`: of the slower of that
    and P, whose every request stands for `answer` tokens; `of_own`: of D's own server, where that was asked; `of_cpu`:
    of the tokens that D alone gives for a second of its own CPU, which is `of_cached` on a machine of D's own."""
    cached = runs[CACHED]["tokens_per_s"]
    against = {"of_cached": cached, "of_limit": min(cached, runs[PREFILL]["tokens_per_s"] * answer)}
    if OWN in runs:
        against["of_own"] = runs[OWN]["tokens_per_s"]
    shares = {
        case: {share: row["tokens_per_s"] / rate for share, rate in against.items()}
        for case, row in runs.items()
        if case != PREFILL  # one token a request: its tokens are not an answer's
    }
    for case in shares:
        shares[case]["of_cpu"] = runs[CACHED]["d_cpu_ms_per_token"] / runs[case]["d_cpu_ms_per_token"]
    return [{"case": case, **row, **shares.get(case, {})} for case, row in runs.items()]


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    """The target itself where TARGET_CLIENTS were measured, and the same against what P lets through."""
    found = [row for row in rows if row["case"] == HANDOFF and row["clients"] == TARGET_CLIENTS]
    return [
        Target(f"tokens/s at C={TARGET_CLIENTS}, of {what}", row[share], TARGET, "x", at_least=True)
        for row in found
        for share, what in SHARES.items()
        if share in row
    ]


class Case(NamedTuple):
    """One way for the prompts of a round. `d_pids`: whose CPU counts. `warm`: ask for each prompt once before."""

    url: str
    route: str
    answer: int
    salt: str
    d_pids: frozenset[int]
    warm: bool = False


class Bench:
    """What is asked of a running system, and of D's own server where there is one."""

    def __init__(self, system: Fleet, own: Own | None, options: argparse.Namespace) -> None:
        self._system = system
        self._own = own
        self._options = options
        self._tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        self._p, self._d = options.engines.split(",")

    def sweep(self) -> list[dict[str, Any]]:
        """Every number of clients, every case."""
        rows = []
        bounds = Bounds(self._options.ttft_ms, self._options.tpot_ms)
        for clients in (int(n) for n in self._options.clients.split(",")):
            taken: dict[str, Run] = {}
            for number in range(self._options.rounds):
                for case, run in self._round(clients, number).items():
                    taken[case] = taken[case] + run if case in taken else run
            runs = {case: row(run, clients, bounds) for case, run in taken.items()}
            rows += compare(runs, self._options.answer)
        return rows

    def _round(self, clients: int, number: int) -> dict[str, Run]:
        options = self._options
        count = max(clients, FEWEST, min(options.requests, FEWEST * clients))
        shortest, longest = (int(n) for n in options.prompts.split(","))
        asked = prompts(self._tokenizer, count, shortest, longest, options.seed + clients + 1000 * number)
        taken = {}
        for name, case in self._cases(f"{clients}-{number}").items():
            taken[name] = self._run(asked, case, clients)
            rate = sum(sample.tokens for sample in taken[name].samples) / taken[name].seconds
            print(f"{clients} clients, {name}: {rate:.1f} tokens/s", flush=True)
        return taken

    def _cases(self, salt: str) -> dict[str, Case]:
        url, pids, answer = self._system.url, self.d_pids, self._options.answer
        found = {HANDOFF: Case(url, f"{self._p}->{self._d}", answer, salt, pids)}
        found[CACHED] = Case(url, f"local:{self._d}", answer, salt, pids)  # D holds what it has imported
        if self._own:
            found[OWN] = Case(self._own.url, OWN, answer, salt, self._own.engine_pids, warm=True)
        found[PREFILL] = Case(url, f"local:{self._p}", 1, f"p-{salt}", pids)
        if self._options.uncached == "yes":
            found[UNCACHED] = Case(url, f"local:{self._d}", answer, f"d-{salt}", pids)
        return found

    def _run(self, asked: list[list[int]], case: Case, clients: int) -> Run:
        model = self._options.model.name
        if case.warm:
            drive(case.url, model, asked, case.route, clients, 1, case.salt)
        before = sum(map(cpu_s, case.d_pids))
        samples, seconds = drive(case.url, model, asked, case.route, clients, case.answer, case.salt)
        return Run(samples, seconds, sum(map(cpu_s, case.d_pids)) - before)

    @property
    def d_pids(self) -> frozenset[int]:
        """D's worker and what it has started."""
        pid = next(child.pid for child in self._system.children if child.name == f"{self._d}-0")
        return frozenset({pid, *below(pid)})


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--requests", type=int, default=64, help="at most, unless there are more clients")
    parser.add_argument("--rounds", type=int, default=1, help="of every case, each with prompts of its own")
    parser.add_argument("--own", choices=("yes", "no"), default="yes", help="D's own server, too, where D is vLLM")
    parser.add_argument("--uncached", choices=("yes", "no"), default="no", help="D alone with nothing cached, too")
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
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        system = stack.enter_context(fleet(options.model, engines, directory, 64))
        wanted = options.own == "yes" and engines[1] in own.ENGINES
        beside = stack.enter_context(own.server(options.model, directory)) if wanted else None
        bench = Bench(system, beside, options)
        parted = cores.can_part()
        if parted:
            cores.part(bench.d_pids | (beside.engine_pids if beside else frozenset()))
        rows = bench.sweep()
    return {
        "question": "tokens/s under load",
        "options": report.options(options),
        "engines": versions(engines),
        "own_core_for_d": parted,
        "rows": rows,
        "targets": report.rows(targets(rows)),
    }


def main() -> None:
    result = run(parse(sys.argv[1:]))
    columns = COLUMNS + RATES
    shown = [[f"{row.get(c, 0):.2f}" if c in RATES else row[c] for c in columns] for row in result["rows"]]
    report.table("under load", columns, shown)
    report.finish("load", result)


if __name__ == "__main__":
    main()
