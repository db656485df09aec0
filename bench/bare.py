"""Bare: an engine alone in a process, with nothing of a worker around it. Runs in the engine's environment.

    python -m bench.bare ENGINE CHECKPOINT SETTINGS(JSON)

Says `ready`, then for each line of JSON on its input, `{"prompts": [[id, ...], ...], "answer": tokens, "clients": n}`,
computes all of it and says `done`.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from pipeline import engines
from pipeline.engines.base import Engine
from pipeline.request import Request, Sampling
from pipeline.settings import EngineSettings


def compute(engine: Engine, answer: int, prompt: Sequence[int]) -> int:
    """Its own prefill and decode; how many tokens came."""
    request = Request(secrets.token_hex(16), tuple(prompt), Sampling(max_tokens=answer, temperature=0.0))
    with closing(engine.admit(request, local=True, timeout_s=600)) as admission:
        return sum(len(step.token_ids) for step in admission.decode())


def main() -> None:
    name, checkpoint, settings = sys.argv[1:]
    with closing(engines.load(name, Path(checkpoint), EngineSettings.model_validate_json(settings))) as engine:
        compute(engine, 3, [1] * 70)
        print("ready", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            with ThreadPoolExecutor(asked["clients"]) as pool:
                list(pool.map(partial(compute, engine, asked["answer"]), asked["prompts"]))
            print("done", flush=True)


if __name__ == "__main__":
    main()
