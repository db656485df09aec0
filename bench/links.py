"""What does a slow link cost? The prefill engine at its far end; broker, decode engine and client here.

For each direction two cases. `new`: P computes the prompt while pages leave, so the time to first token should be the
longer of prefill and transfer. `held by P`: P has just answered the same prompt, so the transfer is nearly all there
is: the link itself is measured. What the wire takes is bytes moved / the rate of plain TCP over the same link in the
same run. Each handoff is held against P alone with the same prompt in the same round; one decode step of D, as measured
in these very answers, is part of every bound, since D computes the last prompt token once more.

First with a checkpoint whose pages are as large as SmolLM2-135M's and that computes next to nothing (`bench.light`):
what comes on top of the wire is then Crossfill. Then with a real model over the slower link, where prefill is longer
than any transfer.

    python -m bench.links [--seconds 210] [--tokens 744] [--real-tokens 320] [--engines vllm,mlx]   # Linux, root
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bench import ending, light, link, report, rounds, wire
from bench.client import Sample
from bench.fleet import versions
from bench.link import Link
from bench.report import Target
from bench.ttft import FEWEST, LIGHT, STOP_S, prompt
from bench.turns import Asker, asking

NEW, HELD = "new", "held by P"
ANSWER = 8
SLACK, SLACK_MS = 0.10, 20.0  # over max(prefill, wire)
COLUMNS = (
    "model",
    "link",
    "prompt_tokens",
    "route",
    "case",
    "samples",
    "megabytes",
    "prefill_ms",
    "wire_ms",
    "step_ms",
)
BOUND = ("ttft_ms", "target_ms", "of_bound", "reached")
LIGHT_SHARE = 0.45  # of the time
REAL_LINKS = ("85 MB/s",)  # that of the target


class Visit(NamedTuple):
    """One prompt over one direction: P alone and the handoff, each with the prompt new and held by P."""

    alone: Sample
    alone_held: Sample
    handed: Sample
    handed_held: Sample


def visit(asker: Asker, ids: list[int], p: str, d: str, number: int) -> Visit:
    """P alone comes before the handoff or after it, by turns. D never holds anything of the prompt."""
    salt = secrets.token_hex(8)

    def alone() -> Sample:
        return asker.ask(ids, f"local:{p}", ANSWER, salt)

    def handed(salt: str) -> Sample:
        return asker.ask(ids, f"{p}->{d}", ANSWER, salt)

    if number % 2:
        new, own = handed(secrets.token_hex(8)), alone()
        held, again = handed(salt), alone()
    else:
        own, new = alone(), handed(secrets.token_hex(8))
        again, held = alone(), handed(salt)
    return Visit(own, again, new, held)


def rows(name: str, rate: float, visits: Sequence[Visit]) -> list[dict[str, Any]]:
    """Both cases of one direction; `rate` in bytes/s. Medians; `of_bound` is that of the handoffs' own shares."""
    cases = {
        NEW: ([each.alone for each in visits], [each.handed for each in visits]),
        HELD: ([each.alone_held for each in visits], [each.handed_held for each in visits]),
    }
    found = []
    for case, (alone, handed) in cases.items():
        moved = handed[0].trace["bytes"]
        step, wire_ms = _median(handed, "step_ms"), 1e3 * moved / rate
        prefill, ttft = _median(alone, "ttft_ms"), _median(handed, "ttft_ms")
        shares = [each.ttft_ms / bound(own.ttft_ms, wire_ms, step) for own, each in zip(alone, handed, strict=True)]
        share = statistics.median(shares)
        row = {"link": name, "prompt_tokens": handed[0].prompt_tokens, "route": handed[0].route, "case": case}
        row |= {"samples": len(visits), "megabytes": moved / 1e6, "prefill_ms": prefill, "wire_ms": wire_ms}
        row |= {"step_ms": step, "ttft_ms": ttft, "target_ms": bound(prefill, wire_ms, step), "of_bound": share}
        found.append(row | {"reached": share <= 1})
    return found


def bound(prefill_ms: float, wire_ms: float, step_ms: float) -> float:
    """What a first token may take."""
    return max(prefill_ms, wire_ms) * (1 + SLACK) + SLACK_MS + step_ms


def _median(samples: Sequence[Sample], what: str) -> float:
    return float(statistics.median(getattr(sample, what) for sample in samples))


def targets(crossed: Sequence[dict[str, Any]]) -> list[Target]:
    """The worst direction of each model, link and case, as a share of what it may take."""
    found = []
    for model, name, case in dict.fromkeys((row["model"], row["link"], row["case"]) for row in crossed):
        shares = [r["of_bound"] for r in crossed if (r["model"], r["link"], r["case"]) == (model, name, case)]
        what = f"{model}: TTFT on {name}, prompt {case}, of max(prefill, wire) + 10 % + 20 ms"
        found.append(Target(what, max(shares), 1, "x"))
    return found


def crossed(
    asker: Asker, made: Link, rates: dict[str, float], tokens: int, options: argparse.Namespace, end_s: float
) -> list[dict[str, Any]]:
    """Prompts of so many `tokens` until `end_s` of the monotonic clock. The links of `rates`, bytes/s, take turns in
    each round, so what disturbs the machine disturbs all."""
    a, b = options.engines.split(",")
    ways = tuple(product(rates, ((a, b), (b, a))))
    visits: dict[Any, list[Visit]] = {way: [] for way in ways}
    for number in range(2):  # every way is gone once before any is timed
        for p, d in ((a, b), (b, a)):
            visit(asker, prompt(asker.tokenizer, number, 80), p, d, number)
    for number in rounds.until(end_s, options.fewest):
        ids = prompt(asker.tokenizer, 100 * options.seed + number, tokens)
        for name, (p, d) in ways:
            made.reshape(link.SHAPED[name])
            visits[name, (p, d)].append(visit(asker, ids, p, d, number))
        print(f"round {number} of prompts of {tokens} tokens", flush=True)
    found = [row for (name, _), each in visits.items() for row in rows(name, rates[name], each)]
    return [{"model": asker.model, **row} for row in found]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Raises RuntimeError where no link can be shaped."""
    start = time.monotonic()
    with ExitStack() as stack:
        made = stack.enter_context(link.shaped(1.25e9))
        rates = wire.rates(made, link.SHAPED)
        with tempfile.TemporaryDirectory() as directory:
            model = light.write(Path(directory) / LIGHT, light.WIDE)
            with asking(model, options, made) as asker:
                end = start + LIGHT_SHARE * options.seconds
                found = crossed(asker, made, rates, options.tokens, options, end)
        if options.real == "yes":
            slow = {name: rates[name] for name in REAL_LINKS}
            with asking(options.model, options, made) as asker:
                end = start + options.seconds - STOP_S
                found += crossed(asker, made, slow, options.real_tokens, options, end)
    return {
        "question": "what a slow link adds",
        "options": report.options(options),
        "engines": versions(options.engines.split(",")),
        "tcp_mb_per_s": {name: round(rate / 1e6, 1) for name, rate in rates.items()},
        "took_s": round(time.monotonic() - start),
        "rows": found,
        "targets": report.rows(targets(found)),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds.arguments(parser, 210, FEWEST)
    parser.add_argument("--tokens", type=int, default=744, help="of a prompt of the light model")
    parser.add_argument("--real-tokens", type=int, default=320, help="of the real one")
    parser.add_argument("--real", choices=("yes", "no"), default="yes", help="with a real model, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", default="vllm,mlx", help="the first one is at the far end")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), help="the real one")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    if why := link.missing():
        print(f"no shaped link can be made here, nothing is measured: {why}")
        return 0
    with ending.orderly():
        result = run(options)
    columns = COLUMNS + BOUND
    shown = [[f"{row[c]:.2f}" if c == "of_bound" else row[c] for c in columns] for row in result["rows"]]
    report.table("TTFT over slow links, ms", columns, shown)
    report.finish("links", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
