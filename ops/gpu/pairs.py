"""Is the text of a handoff the decode engine's own?

    python -m ops.gpu.pairs MODEL RESULT.json --engines sglang,mlx [--at RUN.json] [--pairs sglang->mlx,mlx->sglang]

Greedy text of each pair at every boundary length. Random weights leave many near-ties, and KV of two engines differs by
about 2e-3, so what is told is how many leading characters agree with each engine alone (where it can be alone); wrong
KV would agree on none. Counts are exact: what was transferred and reused makes the prompt where SGLang decodes, and the
prompt without its last token elsewhere.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from bench import ttft
from ops.gpu import system

LENGTHS = "1,2,63,64,65,66,127,128,129,130,192,193,744,2844,8000"
TOKENS = 16


def row(running: system.System, pair: str, prompt: list[int], alone: dict[str, str]) -> dict[str, Any]:
    """Raises RuntimeError when the counts are wrong."""
    decoder = pair.partition("->")[2]
    answer = running.complete(prompt, pair, TOKENS)
    text, trace = answer["choices"][0]["text"], answer["crossfill"]
    moved = {name: trace.get(f"{name}_tokens") for name in ("imported", "reused")}
    wanted = len(prompt) if decoder == "sglang" else len(prompt) - 1
    if sum(moved.values()) != wanted or answer["usage"]["completion_tokens"] != TOKENS:
        raise RuntimeError(f"{pair} at {len(prompt)} tokens: {moved} of {wanted}, {answer['usage']}")
    return {
        "route": pair,
        "prompt_tokens": len(prompt),
        "pages": trace["pages"],
        **{f"{name}_tokens": count for name, count in moved.items()},
        "characters": len(text),
        "leading_equal_to": {engine: leading(text, theirs) for engine, theirs in alone.items()},
        "text": text[:80],
    }


def leading(ours: str, theirs: str) -> int:
    """How many leading characters are equal."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def main() -> None:
    parser = system.arguments(__doc__)
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--pairs", help="default: every ordered pair of the engines, one engine alone with itself")
    options = parser.parse_args()
    engines = options.engines.split(",")
    every = ",".join(f"{p}->{d}" for p in engines for d in engines if p != d or p in system.ONE_ROLE)
    pairs = (options.pairs or every).split(",")
    vocabulary = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    result: dict[str, Any] = {"question": "is the text of a handoff the decode engine's own", "tokens": TOKENS}
    result["rows"] = rows = []
    with system.opened(options) as running:
        for tokens in (int(n) for n in options.lengths.split(",")):
            prompt = ttft.prompt(vocabulary, tokens, tokens)
            alone = {
                engine: running.complete(prompt, f"local:{engine}", TOKENS)["choices"][0]["text"]
                for engine in engines
                if engine not in system.ONE_ROLE
            }
            for pair in pairs:
                rows.append(row(running, pair, prompt, alone))
                print(json.dumps(rows[-1]), flush=True)
            system.save(options, result)
        result["at_rest"] = running.settled()
    system.save(options, result)


if __name__ == "__main__":
    main()
