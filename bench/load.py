"""Many clients at once: how fast do tokens come, and how far is that from the decode engine with every prompt cached?

C clients, each sending its next prompt as soon as the last one's answer is there. Prompt lengths are uniform between
two bounds, half of the prompts begin with a prefix that an earlier one had (as many tokens as half of it). The same
prompts go, one way after another: to the prefill engine alone, one token each, so that it holds them; over the handoff;
to the decode engine alone, which by now holds them, too; to D's own server, which has computed them once before (vLLM
as D: `bench.own`); and over the handoff with nothing held, so that P computes while D decodes. Where all is cached no
prefill is left to do: that is the most that D can give. What P alone can give bounds the last way; nothing is faster
than the slower of the two. Goodput counts answers whose TTFT and time per token stay within the given bounds.

One machine plays several: D has a core of its own in every case, and P, broker, API and client share the others
(`bench.cores`). CPU per token is D's own, which a busy machine distorts least. Clients that begin at once make a wave
of prefills, so each sends two prompts a round at least, and the ways take turns in two rounds or more. Handoffs that P
has to compute for are in the first round only: they take as long as P.

The model is a small one (`bench.light`), so that waves of the target's sizes, 200 to 2,000 tokens in and 128 out, end
within a minute on a CPU. A token of it costs D a few milliseconds, so what Crossfill itself takes for each weighs more
than beside a real model.

    python -m bench.load [--clients 16] [--requests 64] [--seconds 270] [--prompts 200,2000] [--answer 128]
                         [--engines mlx,vllm] [--model PATH] [--own yes] [--computing yes] [--uncached no]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from bench import cores, ending, light, own, report, rounds
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
FEWEST, WAVES = 8, 2  # requests of a round, and of each client
STOP_S = 10.0  # what systems need to end
HELD, HANDOFF = "handoff, P holds all", "handoff, P computes"
PREFILL, UNCACHED, CACHED = "P alone, one token", "D alone", "D alone, all cached"
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
    """The target itself where TARGET_CLIENTS were measured, beside others' yardsticks; where P computes, the share of
    what P lets through as well."""
    wanted = {HELD: ("of_own", "of_cached", "of_cpu"), HANDOFF: ("of_own", "of_limit", "of_cpu")}
    return [
        Target(f"tokens/s at C={TARGET_CLIENTS}, {row['case']}, of {SHARES[share]}", row[share], TARGET, "x", True)
        for row in rows
        if row["clients"] == TARGET_CLIENTS
        for share in wanted.get(row["case"], ())
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

    def __init__(self, system: Fleet, own: Own | None, model: Path, options: argparse.Namespace) -> None:
        self._system = system
        self._own = own
        self._options = options
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._p, self._d = options.engines.split(",")

    def sweep(self, end_s: float) -> list[dict[str, Any]]:
        """Every number of clients, every case, in rounds until `end_s` of the monotonic clock."""
        counts = [int(n) for n in self._options.clients.split(",")]
        taken: dict[tuple[int, str], Run] = {}
        for number in rounds.until(end_s, self._options.fewest):
            for clients, case, run in self._round(counts, number):
                taken[clients, case] = taken[clients, case] + run if number else run
        bounds = Bounds(self._options.ttft_ms, self._options.tpot_ms)
        return [
            each
            for clients in counts
            for each in compare(
                {case: row(run, clients, bounds) for (there, case), run in taken.items() if there == clients},
                self._options.answer,
            )
        ]

    def _round(self, counts: list[int], number: int) -> Iterator[tuple[int, str, Run]]:
        options = self._options
        shortest, longest = (int(n) for n in options.prompts.split(","))
        for clients in counts:
            asked = prompts(
                self._tokenizer, self._count(clients), shortest, longest, options.seed + clients + 1000 * number
            )
            for name, case in self._cases(f"{clients}-{number}", number).items():
                run = self._run(asked, case, clients)
                rate = sum(sample.tokens for sample in run.samples) / run.seconds
                print(f"{clients} clients, {name}: {rate:.1f} tokens/s", flush=True)
                yield clients, name, run

    def _count(self, clients: int) -> int:
        """Requests of a round: two of each client, and eight of one alone."""
        return max(clients, min(int(self._options.requests), max(FEWEST, WAVES * clients)))

    def _cases(self, salt: str, number: int) -> dict[str, Case]:
        url, pids, options = self._system.url, self.d_pids, self._options
        handed, local, answer = f"{self._p}->{self._d}", f"local:{self._d}", options.answer
        found = {PREFILL: Case(url, f"local:{self._p}", 1, salt, pids)}  # P now holds the prompts
        found[HELD] = Case(url, handed, answer, salt, pids)
        found[CACHED] = Case(url, local, answer, salt, pids)  # D holds what it has imported
        if self._own:
            found[OWN] = Case(self._own.url, OWN, answer, salt, self._own.engine_pids, warm=True)
        if options.computing == "yes" and not number:
            found[HANDOFF] = Case(url, handed, answer, f"h-{salt}", pids)
        if options.uncached == "yes":
            found[UNCACHED] = Case(url, local, answer, f"d-{salt}", pids)
        return found

    def _run(self, asked: list[list[int]], case: Case, clients: int) -> Run:
        model = self._model.name
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
    parser.add_argument("--clients", default="16")
    parser.add_argument("--requests", type=int, default=64, help="of a round at most, unless there are more clients")
    rounds.arguments(parser, 270, 2)
    parser.add_argument("--own", choices=("yes", "no"), default="yes", help="D's own server, too, where D is vLLM")
    parser.add_argument(
        "--computing", choices=("yes", "no"), default="yes", help="handoffs that P holds nothing of, too"
    )
    parser.add_argument("--uncached", choices=("yes", "no"), default="no", help="D alone with nothing cached, too")
    parser.add_argument("--prompts", default="200,2000")
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--engines", default="mlx,vllm")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--ttft-ms", type=float, default=5000.0)
    parser.add_argument("--tpot-ms", type=float, default=500.0)
    parser.add_argument("--model", type=Path, help="a real one; left out: `bench.light`'s small one")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    engines = options.engines.split(",")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = options.model or light.write(directory / "small", light.SMALL)
        system = stack.enter_context(fleet(model, engines, directory, 64))
        wanted = options.own == "yes" and engines[1] in own.ENGINES
        beside = stack.enter_context(own.server(model, directory)) if wanted else None
        bench = Bench(system, beside, model, options)
        parted = cores.can_part()
        if parted:
            cores.part(bench.d_pids | (beside.engine_pids if beside else frozenset()))
        rows = bench.sweep(start + options.seconds - STOP_S)
    return {
        "question": "tokens/s under load",
        "options": report.options(options),
        "engines": versions(engines),
        "own_core_for_d": parted,
        "took_s": round(time.monotonic() - start),
        "rows": rows,
        "targets": report.rows(targets(rows)),
    }


def main() -> None:
    with ending.orderly():
        result = run(parse(sys.argv[1:]))
    columns = COLUMNS + RATES
    shown = [[f"{row.get(c, 0):.2f}" if c in RATES else row[c] for c in columns] for row in result["rows"]]
    report.table("under load", columns, shown)
    report.finish("load", result)


if __name__ == "__main__":
    main()
