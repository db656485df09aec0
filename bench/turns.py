"""A chat of ten turns: what does a turn cost when the one before is still cached?

Each turn's prompt is the last one, its answer and a new question; both engines keep what they have computed. Per turn
and direction: tokens that D already held, pages that moved, TTFT, and what it adds over the prefill engine alone in
the same conversation (it has its own prefix cached too) plus one measured decode step of D.

    python -m bench.turns [--turns 10] [--first 600] [--more 96] [--answer 32] [--engines vllm,mlx]
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from bench import report
from bench.client import Sample, stream
from bench.fleet import fleet
from bench.report import Target
from bench.ttft import prompt

COLUMNS = ("turn", "route", "prompt_tokens", "held_tokens", "pages", "ttft_ms", "prefill_alone_ms", "added_ms")
ADDED_MS = 25.0


def talk(
    client: httpx.Client, model: Path, tokenizer: Tokenizer, route: str, options: argparse.Namespace
) -> list[Sample]:
    """One conversation over one route, alone in its salt."""
    salt, ids, samples = secrets.token_hex(8), prompt(tokenizer, 1, options.first), []
    for turn in range(options.turns):
        sample = stream(client, model.name, ids, route, options.answer, salt)
        samples.append(sample)
        answer = tokenizer.encode(sample.text, add_special_tokens=False).ids
        ids = ids + answer + prompt(tokenizer, turn + 2, options.more)
        print(f"{route} turn {turn + 1}: {sample.prompt_tokens} tokens, {sample.ttft_ms:.0f} ms", flush=True)
    return samples


def rows(talks: dict[str, list[Sample]], a: str, b: str) -> list[dict[str, Any]]:
    """Per turn and direction; answers differ a little between engines, and so do the prompts of later turns."""
    found = []
    for p, d in ((a, b), (b, a)):
        for index, sample in enumerate(talks[f"{p}->{d}"]):
            alone, step = talks[f"local:{p}"][index].ttft_ms, talks[f"local:{d}"][index].step_ms
            found.append(
                {
                    "turn": index + 1,
                    "route": sample.route,
                    "prompt_tokens": sample.prompt_tokens,
                    "held_tokens": sample.trace["reused_tokens"],
                    "pages": sample.trace["pages"],
                    "bytes": sample.trace["bytes"],
                    "ttft_ms": sample.ttft_ms,
                    "prefill_alone_ms": alone,
                    "added_ms": sample.ttft_ms - alone - step,
                }
            )
    return found


def talks(client: httpx.Client, tokenizer: Tokenizer, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same conversation with each engine alone and over both directions, as rows."""
    a, b = options.engines.split(",")
    routes = (f"local:{a}", f"local:{b}", f"{a}->{b}", f"{b}->{a}")
    return rows({route: talk(client, options.model, tokenizer, route, options) for route in routes}, a, b)


def targets(found: list[dict[str, Any]]) -> list[Target]:
    """What later turns add, per direction: the median over them. On the loopback no wire time is taken off."""
    later: dict[str, list[float]] = {}
    for row in found:
        if row["turn"] > 1:
            later.setdefault(row["route"], []).append(row["added_ms"])
    return [
        Target(f"{route}: added by a later turn", statistics.median(added), ADDED_MS, "ms")
        for route, added in later.items()
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--first", type=int, default=600)
    parser.add_argument("--more", type=int, default=96)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--engines", default="vllm,mlx")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    a, b = options.engines.split(",")
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    with (
        tempfile.TemporaryDirectory() as directory,
        fleet(options.model, (a, b), Path(directory), 64) as system,
        httpx.Client(base_url=system.url, timeout=600) as client,
    ):
        stream(client, options.model.name, prompt(tokenizer, 0, 80), f"{a}->{b}", 4)
        found = talks(client, tokenizer, options)
    asked = report.options(options)
    return {"question": "cost of a turn", "options": asked, "rows": found, "targets": report.rows(targets(found))}


def main() -> None:
    result = run(parse(sys.argv[1:]))
    report.table("a chat, turn by turn", COLUMNS, [[row[column] for column in COLUMNS] for row in result["rows"]])
    report.finish("turns", result)


if __name__ == "__main__":
    main()
