"""A turn of a chat whose beginning is cached: what moves, how long does it take, and what does a handoff add?

Three parts, all with real engines. A chat of ten turns: each prompt is the last one, its answer and a new question.
Then the target's own case, many times: the second turn after a long first one, which both engines hold; every sample
asks something new, so that only the beginning is held. Added is the handoff minus the prefill engine alone in the same
round, by the median of those differences, minus one decode step of D, which computes the last prompt token once more.

The first two run with a checkpoint that computes next to nothing (`bench.light`), P behind links of several rates: what
is added is then Crossfill and the wire. The third part is second turns with a real model on the loopback: there a turn
takes a second or more of a shared core, and differs from the next by more than a handoff costs. Ways take turns within
a round, in the other order every other round, so what disturbs the machine disturbs all.

    python -m bench.turns [--seconds 210] [--turns 10] [--held 2800] [--real-held 1024] [--seed 1] [--engines vllm,mlx]
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from bench import ending, light, link, report, rounds, wire
from bench.client import Sample, stream
from bench.fleet import fleet, versions
from bench.link import Link
from bench.report import Target
from bench.ttft import FEWEST, LIGHT, STOP_S, prompt, routes

COLUMNS = ("turn", "route", "prompt_tokens", "held_tokens", "pages", "ttft_ms", "prefill_alone_ms", "added_ms")
TIMES = ("prefill_alone_ms", "step_ms", "wire_ms", "ttft_ms", "added_ms", "target_ms")
SECOND = ("model", "link", "route", "samples", "prompt_tokens", "held_tokens", "pages", *TIMES, "reached")
ADDED_MS = 25.0  # beside the wire time of the tail
SHORT = 8  # tokens of a second turn's answer
LOOPBACK = "loopback"
LINKS = {"10 Gb/s": 1.25e9} | link.SHAPED
LIGHT_SHARE = 0.45  # of the time


class Chat:
    """One conversation over one route, alone in its salt."""

    def __init__(self, asker: Asker, route: str, options: argparse.Namespace) -> None:
        self.samples: list[Sample] = []
        self._asker = asker
        self._route = route
        self._options = options
        self._salt = secrets.token_hex(8)
        self._ids = prompt(asker.tokenizer, 100 * options.seed, options.first)

    def turn(self) -> None:
        options, tokenizer, number = self._options, self._asker.tokenizer, len(self.samples) + 1
        sample = self._asker.ask(self._ids, self._route, options.answer, self._salt)
        self.samples.append(sample)
        answer = tokenizer.encode(sample.text, add_special_tokens=False).ids
        self._ids = self._ids + answer + prompt(tokenizer, 100 * options.seed + number, options.more)


class Asker(NamedTuple):
    """A running system, its model's name and words."""

    client: httpx.Client
    model: str
    tokenizer: Tokenizer

    @staticmethod
    def of(client: httpx.Client, model: Path) -> Asker:
        return Asker(client, model.name, Tokenizer.from_file(str(model / "tokenizer.json")))

    def ask(self, ids: list[int], route: str, answer: int, salt: str) -> Sample:
        return stream(self.client, self.model, ids, route, answer, salt)


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


def talks(asker: Asker, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same conversation with each engine alone and over both directions, as rows."""
    chats = {route: Chat(asker, route, options) for route in routes(options.engines)}
    for _ in range(options.turns):
        for chat in chats.values():
            chat.turn()
    return rows({route: chat.samples for route, chat in chats.items()}, *options.engines.split(","))


class Second:
    """Second turns over every route, of a chat whose first `held` tokens both engines hold."""

    def __init__(self, asker: Asker, options: argparse.Namespace, held: int) -> None:
        self._asker = asker
        self._options = options
        self._routes = routes(options.engines)
        self._salt = secrets.token_hex(8)
        self._first = prompt(asker.tokenizer, 10_000 * options.seed, held)
        self._asked = 0

    def warm(self) -> None:
        """The first turn, computed once and held by both; then every way is gone once before any is timed."""
        self._asker.ask(self._first, self._routes[1], SHORT, self._salt)
        self.round(0)

    def round(self, number: int) -> dict[str, Sample]:
        order = self._routes[:: -1 if number % 2 else 1]
        return {route: self._asker.ask(self._first + self._question(), route, SHORT, self._salt) for route in order}

    def _question(self) -> list[int]:
        """Never asked before, from its first token on."""
        self._asked += 1
        ids = prompt(self._asker.tokenizer, 10_000 * self._options.seed + self._asked, self._options.more)
        return [3 + self._asked, *ids[1:]]


def seconds(taken: list[dict[str, Sample]], a: str, b: str, rate: float | None = None) -> list[dict[str, Any]]:
    """A row per direction over the rounds: medians, and of what is added the median of the differences within a round.
    `rate` in bytes/s: of the link, whose time for the tail may come on top; None for the loopback."""
    found = []
    for p, d in ((a, b), (b, a)):
        handed = [each[f"{p}->{d}"] for each in taken]
        step = statistics.median(each[f"local:{d}"].step_ms for each in taken)
        alone = [each[f"local:{p}"].ttft_ms for each in taken]
        over = statistics.median(sample.ttft_ms - own for sample, own in zip(handed, alone, strict=True)) - step
        row: dict[str, Any] = {"route": f"{p}->{d}", "samples": len(taken), "prompt_tokens": handed[0].prompt_tokens}
        row |= {"held_tokens": min(sample.trace["reused_tokens"] for sample in handed)}
        row |= {what: statistics.median(sample.trace[what] for sample in handed) for what in ("pages", "bytes")}
        wire_ms = 1e3 * row["bytes"] / rate if rate else 0.0
        row |= {"prefill_alone_ms": statistics.median(alone), "step_ms": step, "wire_ms": wire_ms}
        row |= {"ttft_ms": statistics.median(sample.ttft_ms for sample in handed), "added_ms": over}
        found.append(row | {"target_ms": ADDED_MS + wire_ms, "reached": over <= ADDED_MS + wire_ms})
    return found


def targets(found: list[dict[str, Any]]) -> list[Target]:
    """What a second turn adds beside the wire time of its tail."""
    return [
        Target(
            f"{row['model']}, {row['link']}, {row['route']}: added by a second turn, {row['held_tokens']} tokens held",
            row["added_ms"] - row["wire_ms"],
            ADDED_MS,
            "ms",
        )
        for row in found
    ]


def over_links(
    second: Second, options: argparse.Namespace, made: Link | None, rates: dict[str, float], end_s: float
) -> list[dict[str, Any]]:
    """Second turns until `end_s` of the monotonic clock. `rates` in bytes/s: the links take turns in each round."""
    second.warm()
    taken: dict[str, list[dict[str, Sample]]] = {name: [] for name in rates or (LOOPBACK,)}
    for number in rounds.until(end_s, options.fewest):
        for name, here in taken.items():
            if made:
                made.reshape(LINKS[name])
            here.append(second.round(number))
        print(f"round {number} of second turns", flush=True)
    a, b = options.engines.split(",")
    return [{"link": name, **row} for name, here in taken.items() for row in seconds(here, a, b, rates.get(name))]


@contextmanager
def asking(model: Path, options: argparse.Namespace, made: Link | None = None) -> Iterator[Asker]:
    """A system of both engines, the first one at the far end of `made`."""
    with (
        tempfile.TemporaryDirectory() as directory,
        fleet(model, options.engines.split(","), Path(directory), 64, made) as system,
        httpx.Client(base_url=system.url, timeout=600) as client,
    ):
        yield Asker.of(client, model)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Without root the light model, too, is asked on the loopback alone."""
    start = time.monotonic()
    why = link.missing()
    with ExitStack() as stack:
        model = light.write(Path(stack.enter_context(tempfile.TemporaryDirectory())) / LIGHT, light.NARROW)
        made = None if why else stack.enter_context(link.shaped(LINKS["10 Gb/s"]))
        rates = wire.rates(made, LINKS) if made else {}
        asker = stack.enter_context(asking(model, options, made))
        found = talks(asker, options)
        end = start + LIGHT_SHARE * options.seconds
        later = over_links(Second(asker, options, options.held), options, made, rates, end)
    later = [{"model": LIGHT, **row} for row in later]
    if options.real == "yes":
        with asking(options.model, options) as asker:
            second = Second(asker, options, options.real_held)
            again = over_links(second, options, None, {}, start + options.seconds - STOP_S)
        later += [{"model": options.model.name, **row} for row in again]
    return {
        "question": "cost of a turn",
        "options": report.options(options),
        "engines": versions(options.engines.split(",")),
        "no_links": why,
        "tcp_mb_per_s": {name: round(rate / 1e6, 1) for name, rate in rates.items()},
        "took_s": round(time.monotonic() - start),
        "rows": found,
        "second": later,
        "targets": report.rows(targets(later)),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds.arguments(parser, 210, FEWEST)
    parser.add_argument("--turns", type=int, default=10, help="of the chat")
    parser.add_argument("--first", type=int, default=600, help="tokens of its first turn")
    parser.add_argument("--more", type=int, default=96, help="new tokens of each later turn")
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--held", type=int, default=2800, help="tokens of the first turn of the target's chat")
    parser.add_argument("--real-held", type=int, default=1024, help="the same, of the real model's")
    parser.add_argument("--real", choices=("yes", "no"), default="yes", help="second turns with a real model, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", default="vllm,mlx")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), help="the real one")
    return parser.parse_args(arguments)


def main() -> None:
    with ending.orderly():
        result = run(parse(sys.argv[1:]))
    report.table("a chat, turn by turn", COLUMNS, [[row[column] for column in COLUMNS] for row in result["rows"]])
    report.table("second turns", SECOND, [[row[column] for column in SECOND] for row in result["second"]])
    report.finish("turns", result)


if __name__ == "__main__":
    main()
