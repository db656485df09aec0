"""`crossfill demo`: brings everything up, asks one question in each direction, shows what moved and when, stops."""

from __future__ import annotations

import argparse
from itertools import permutations
from typing import Any

from rich.console import Console

from pipeline.cli import up, waterfall
from pipeline.cli.chat import Answer, ask
from pipeline.errors import CrossfillError
from pipeline.page import PAGE_TOKENS
from pipeline.settings import Settings

# Long enough for several pages of 64 tokens; a different sentence per direction keeps prefix caches out of the picture.
PASSAGE = """\
A harbour town has two bakers. The first owns a very large oven: it needs an hour to heat, but once it is hot it \
bakes a hundred loaves at a time. The second has a small oven and a shop in the busiest street, and customers want \
one warm roll after the other, all day long, without waiting. For years each of them worked alone. The first had \
nobody to sell rolls one by one, and the second could never bake enough loaves before the doors opened. One winter \
they agreed to share the work. The large oven bakes the dough through in the early morning, and a boy on a bicycle \
carries each tray to the shop as soon as it is done, while the next tray is still in the oven. The small oven then \
only has to warm the rolls and hand them over the counter."""
QUESTION = "Why did the two bakers decide to share the work? Answer in two sentences."
MAX_TOKENS = 64


class DemoError(CrossfillError):
    """The answer came, but not by the way it was asked to take."""

    code = "demo_failed"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("demo", help="start everything, ask in each direction, show the traces, stop")
    up.add_flags(command)
    command.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help=f"length of an answer ({MAX_TOKENS})")
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> None:
    console = Console()
    settings = small_chunks(up.settings(options))
    for note in notes(settings):
        console.print(note, soft_wrap=True)
    with up.running(settings, options, console) as fleet:
        for number, (prefill, decode) in enumerate(directions(settings), start=1):
            console.rule(f"prefill on {prefill}, decode on {decode}")
            answer = ask(fleet.url, body(settings, number, options.max_tokens), f"{prefill}->{decode}")
            show(console, answer)
            require_handoff(answer.trace, prefill, decode)
    console.print("[green]demo done[/]")


def small_chunks(settings: Settings) -> Settings:
    """Prefill page by page, unless told otherwise: else this short prompt is one chunk and no page leaves early."""
    workers = [
        worker
        if "chunk_tokens" in worker.engine_settings.model_fields_set
        else worker.model_copy(
            update={"engine_settings": worker.engine_settings.model_copy(update={"chunk_tokens": PAGE_TOKENS})}
        )
        for worker in settings.workers
    ]
    return settings.model_copy(update={"workers": tuple(workers)})


def directions(settings: Settings) -> list[tuple[str, str]]:
    """(prefill engine, decode engine): every ordered pair of two engines, or the only one with itself."""
    prefill = [worker.engine for worker in settings.workers if worker.role != "decode"]
    decode = {worker.engine for worker in settings.workers if worker.role != "prefill"}
    names = list(dict.fromkeys([*prefill, *decode]))
    pairs = [(a, b) for a, b in permutations(names, 2) if a in prefill and b in decode]
    return pairs or [(a, a) for a in names if a in prefill and a in decode]


def notes(settings: Settings) -> list[str]:
    """What the reader should know of the engines that stand in for absent ones."""
    engines = {worker.engine for worker in settings.workers}
    found = (
        ["vLLM is not part of this set-up (`make env-vllm` installs it where it can)."] if "vllm" not in engines else []
    )
    if "reference" in engines:
        found.append("`reference`, our slow and exact numpy engine, stands in for an engine that is not here.")
    if len(engines) == 1:
        found.append(f"{engines.pop()} serves both roles, in two processes: pages cross the broker all the same.")
    return found


def body(settings: Settings, number: int, max_tokens: int) -> dict[str, Any]:
    assert settings.api is not None  # Fleet refuses settings without it
    messages = [{"role": "user", "content": f"Story {number}. {PASSAGE}\n\n{QUESTION}"}]
    name = settings.api.served_name or settings.api.model.name
    return {"model": name, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


def show(console: Console, answer: Answer) -> None:
    """The text as it comes, then the trace."""
    for text in answer:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print("\n")
    console.print(waterfall.title(answer.trace), highlight=False, soft_wrap=True)
    console.print(waterfall.table(answer.trace))
    console.print()


def require_handoff(trace: dict[str, Any], prefill: str, decode: str) -> None:
    """Raise DemoError unless KV went from `prefill` to `decode`: a silent fallback must not look like success."""
    route = trace.get("route") or {}
    taken = (route.get("prefill_engine"), route.get("decode_engine"))
    if taken != (prefill, decode) or not trace.get("imported_tokens") or trace.get("recomputed"):
        raise DemoError(f"no KV was handed from {prefill} to {decode}; the trace says {trace}")
