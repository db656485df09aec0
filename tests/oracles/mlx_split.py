"""Plain mlx-lm at the split of a handoff: prompt-1 tokens into the cache, then the last token alone, greedy.

Run as a process of its own, without a line of Crossfill: `{"model", "prompts": [[ids]], "max_tokens"}` on standard
input, `{"outputs": [{"tokens": [...], "margins": [...]}]}` on standard output; a margin is the top-2 gap in logits.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

CHUNK = 256


def main() -> None:
    task = json.load(sys.stdin)
    model, _ = load_model(Path(task["model"]))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    outputs = [continued(model, prompt, task["max_tokens"]) for prompt in task["prompts"]]
    json.dump({"outputs": outputs}, sys.stdout)


def continued(model: object, prompt: list[int], max_tokens: int) -> dict[str, list[float]]:
    cache = make_prompt_cache(model)
    for start in range(0, len(prompt) - 1, CHUNK):
        model(mx.array(prompt[:-1][start : start + CHUNK])[None], cache=cache)  # type: ignore[operator]
        mx.eval([(layer.keys, layer.values) for layer in cache])
    tokens, margins, last = [], [], prompt[-1]
    for _ in range(max_tokens):
        logits = model(mx.array([[last]]), cache=cache)[0, -1].astype(mx.float32)  # type: ignore[operator]
        second, first = mx.sort(logits)[-2:].tolist()
        last = int(mx.argmax(logits))
        tokens.append(last)
        margins.append(first - second)
    return {"tokens": tokens, "margins": margins}


if __name__ == "__main__":
    main()
