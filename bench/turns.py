"""A chat of ten turns: what does a turn cost when the one before is still cached?

Each turn's prompt is the last one, its answer and a new question; both engines keep what they have computed. Per turn
and direction: tokens that D already held, pages that moved, TTFT, and what it adds over the prefill engine alone in
the same conversation (it has its own prefix cached too) plus one measured decode step of D. The four ways take turns,
so what disturbs the machine disturbs all.

Then the target's own case, many times: the second turn after a long first one, which both engines hold. Every sample
asks something new, so that only the long beginning is held.

    python -m bench.turns [--turns 10] [--first 600] [--held 2800] [--rounds 7] [--seed 1] [--engines vllm,mlx]
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
from bench.fleet import fleet, versions
from bench.report import Target
from bench.ttft import prompt
from pipeline.cli.fleet import Fleet

COLUMNS = ("turn", "route", "prompt_tokens", "held_tokens", "pages", "ttft_ms", "prefill_alone_ms", "added_ms")
SECOND = (
    "route",
    "rounds",
    "prompt_tokens",
    "held_tokens",
    "pages",
    "ttft_ms",
    "prefill_alone_ms",
    "step_ms",
    "added_ms",
)
ADDED_MS = 25.0


def routes(options: argparse.Namespace) -> tuple[str, ...]:
    a, b = options.engines.split(",")
    return f"local:{a}", f"local:{b}", f"{a}->{b}", f"{b}->{a}"


class Chat:
    """One conversation over one route, alone in its salt."""

    def __init__(self, tokenizer: Tokenizer, route: str, options: argparse.Namespace) -> None:
        self.samples: list[Sample] = []
        self._tokenizer = tokenizer
        self._route = route
        self._options = options
        self._salt = secrets.token_hex(8)
        self._ids = prompt(tokenizer, 100 * options.seed, options.first)

    def turn(self, client: httpx.Client) -> None:
        options, number = self._options, len(self.samples) + 1
        sample = stream(client, options.model.name, self._ids, self._route, options.answer, self._salt)
        self.samples.append(sample)
        answer = self._tokenizer.encode(sample.text, add_special_tokens=False).ids
        self._ids = self._ids + answer + prompt(self._tokenizer, 100 * options.seed + number, options.more)
        print(f"{self._route} turn {number}: {sample.prompt_tokens} tokens, {sample.ttft_ms:.0f} ms", flush=True)


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
    chats = {route: Chat(tokenizer, route, options) for route in routes(options)}
    for _ in range(options.turns):
        for chat in chats.values():
            chat.turn(client)
    a, b = options.engines.split(",")
    return rows({route: chat.samples for route, chat in chats.items()}, a, b)


class Second:
    """Second turns over every route, of a chat whose first `held` tokens both engines hold."""

    def __init__(self, client: httpx.Client, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._options = options
        self._salt = secrets.token_hex(8)
        self._first = prompt(tokenizer, 10_000 * options.seed, options.held)
        self._asked = 0

    def warm(self) -> None:
        """The first turn, computed once and held by both."""
        self._ask(routes(self._options)[2], self._first)

    def round(self) -> dict[str, Sample]:
        return {route: self._ask(route, self._first + self._question()) for route in routes(self._options)}

    def _question(self) -> list[int]:
        """Never asked before, from its first token on."""
        self._asked += 1
        ids = prompt(self._tokenizer, 10_000 * self._options.seed + self._asked, self._options.more)
        return [self._asked, *ids[1:]]

    def _ask(self, route: str, ids: list[int]) -> Sample:
        return stream(self._client, self._options.model.name, ids, route, self._options.answer, self._salt)


def seconds(rounds: list[dict[str, Sample]], a: str, b: str) -> list[dict[str, Any]]:
    """A row per direction: medians over the rounds. `wire_ms` on the loopback is not taken off."""
    found = []
    for p, d in ((a, b), (b, a)):
        handed = [each[f"{p}->{d}"] for each in rounds]
        ttft, alone, step = (
            statistics.median(values)
            for values in (
                [sample.ttft_ms for sample in handed],
                [each[f"local:{p}"].ttft_ms for each in rounds],
                [each[f"local:{d}"].step_ms for each in rounds],
            )
        )
        row = {"route": f"{p}->{d}", "prompt_tokens": handed[0].prompt_tokens, "rounds": len(rounds)}
        row |= {"held_tokens": min(sample.trace["reused_tokens"] for sample in handed)}
        row |= {what: max(sample.trace[what] for sample in handed) for what in ("pages", "bytes")}
        row |= {"ttft_ms": ttft, "prefill_alone_ms": alone, "step_ms": step, "added_ms": ttft - alone - step}
        found.append(row)
    return found


def targets(found: list[dict[str, Any]]) -> list[Target]:
    """What the second turn adds, per direction. On the loopback no wire time is taken off."""
    return [
        Target(f"{row['route']}, second turn, {row['held_tokens']} tokens held: added", row["added_ms"], ADDED_MS, "ms")
        for row in found
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--first", type=int, default=600)
    parser.add_argument("--more", type=int, default=96)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--held", type=int, default=2800, help="tokens of the first turn of the target's chat")
    parser.add_argument("--rounds", type=int, default=7, help="samples of its second turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", default="vllm,mlx")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    return parser.parse_args(arguments)


def measure(system: Fleet, options: argparse.Namespace) -> dict[str, Any]:
    """Against a running system with both engines."""
    a, b = options.engines.split(",")
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    with httpx.Client(base_url=system.url, timeout=600) as client:
        second = Second(client, tokenizer, options)
        second.warm()
        second.round()  # every way was gone once before any is timed
        found = talks(client, tokenizer, options)
        later = seconds([second.round() for _ in range(options.rounds)], a, b)
    return {
        "question": "cost of a turn",
        "options": report.options(options),
        "engines": versions((a, b)),
        "rows": found,
        "second": later,
        "targets": report.rows(targets(later)),
    }


def main() -> None:
    options = parse(sys.argv[1:])
    with (
        tempfile.TemporaryDirectory() as directory,
        fleet(options.model, options.engines.split(","), Path(directory), 64) as system,
    ):
        result = measure(system, options)
    report.table("a chat, turn by turn", COLUMNS, [[row[column] for column in COLUMNS] for row in result["rows"]])
    report.table("second turns", SECOND, [[row[column] for column in SECOND] for row in result["second"]])
    report.finish("turns", result)


if __name__ == "__main__":
    main()
