"""TTFT of each engine alone and of handoffs between them, over the API, engines in processes of their own.

    python -m ops.gpu.ttft MODEL RESULT.json --engines vllm,mlx [--at RUN.json] [--samples 5] [--lengths 51,8000]

`bench/ttft.py` with its prompts and its definition of added TTFT. SGLang has no way alone: where it prefills, "alone"
is the median of its own prefill in these very handoffs; where it decodes, the step is the one measured in them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from tokenizers import Tokenizer

from bench import ttft
from bench.client import Sample, stream
from ops.gpu import system


def routes(engines: list[str]) -> list[str]:
    locals_ = [f"local:{engine}" for engine in engines if engine not in system.ONE_ROLE]
    return locals_ + [f"{p}->{d}" for p in engines for d in engines if p != d]


def measure(running: system.System, options: argparse.Namespace, tokens: int, chosen: list[str]) -> list[Sample]:
    """A warm-up of each route, then rounds over all of them."""
    vocabulary = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    taken = []
    for number in range(options.samples + 1):
        for at, route in enumerate(chosen):
            prompt = ttft.prompt(vocabulary, 100 * number + at, tokens)
            sample = stream(running.http, options.model.name, prompt, route, options.tokens)
            taken += [sample] if number else []
    return taken


def summary(samples: list[Sample]) -> list[dict[str, Any]]:
    """One row per length and direction; medians in ms."""
    by: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        by.setdefault((sample.route, sample.prompt_tokens), []).append(sample)
    handed = [key for key in by if "->" in key[0]]
    return [_row(by, route, tokens) for route, tokens in sorted(handed, key=lambda key: (key[1], key[0]))]


def _row(by: dict[tuple[str, int], list[Sample]], route: str, tokens: int) -> dict[str, Any]:
    p, _, d = route.partition("->")
    ours = by[route, tokens]
    alone, own = by.get((f"local:{p}", tokens)), by.get((f"local:{d}", tokens))
    took = _median([s.ttft_ms for s in alone] if alone else [ttft.stages(s.trace)["prefill"] for s in ours])
    step = _median([s.step_ms for s in own or ours])
    total = _median([s.ttft_ms for s in ours])
    ahead = [s.trace["marks_ms"] for s in ours]
    return {
        "prompt_tokens": tokens,
        "route": route,
        "prefill_alone_ms": took,
        "decode_step_ms": step,
        "ttft_ms": total,
        "added_ms": total - took - step,
        "added_percent": 100 * (total - took - step) / took,
        "first_page_before_prefill_end_ms": _median([m["prefill_ended"] - m["first_page_out"] for m in ahead]),
        "pages": ours[0].trace["pages"],
        "bytes": ours[0].trace["bytes"],
        **{stage: _median([ttft.stages(s.trace)[stage] for s in ours]) for stage in ttft.STAGES},
    }


def _raw(sample: Sample) -> dict[str, Any]:
    named = {name: getattr(sample, name) for name in ("route", "prompt_tokens", "ttft_ms", "step_ms")}
    return named | {"marks_ms": sample.trace.get("marks_ms")}


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 1)


def main() -> None:
    parser = system.arguments(__doc__)
    parser.add_argument("--lengths", default="51,184,744,2844,8000,32000")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--routes", help="default: each engine alone where it can be, and every direction")
    options = parser.parse_args()
    engines = options.engines.split(",")
    chosen = options.routes.split(",") if options.routes else routes(engines)
    result: dict[str, Any] = {"question": "TTFT of each engine alone and of each direction, on one GPU"}
    result |= {"samples": options.samples, "rows": [], "raw": []}
    with system.opened(options) as running:
        for tokens in (int(n) for n in options.lengths.split(",")):
            taken = measure(running, options, tokens, chosen)
            result["rows"] += (rows := summary(taken))
            result["raw"] += [_raw(sample) for sample in taken]
            for row in rows:
                print(json.dumps(row), flush=True)
            system.save(options, result)  # what was measured stays, whatever comes


if __name__ == "__main__":
    main()
