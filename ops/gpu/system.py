"""The whole system on one GPU: pair checks and time to first token, over the API, engines in processes of their own.

    python -m ops.gpu.system pairs|ttft MODEL RESULT.json [--engines vllm,mlx] [--chunk 1024]

`pairs`: greedy text of both directions against each engine alone. Random weights leave many near-ties, and KV of two
engines differs by about 2e-3, so what is checked is how many leading tokens agree; wrong KV would agree on none.
`ttft`: `bench/ttft.py` with its prompts and its definition of added TTFT.

Each engine's packages are looked for in the folder that CROSSFILL_SITE_<ENGINE> names, else in this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from bench import ttft
from bench.fleet import free_port
from pipeline.cli.fleet import Fleet
from pipeline.settings import Settings

ROOT = Path(__file__).parents[2]
PAIR_LENGTHS = (2, 51, 64, 65, 129, 193, 744, 2844, 8000)
PAIR_TOKENS = 16
READY_S = 240.0
ONE_ROLE = ("sglang",)  # a worker of it prefills or decodes, and its decoder computes no prompt: no `local:` route


def environment(engine: str) -> dict[str, str]:
    """What the worker of `engine` needs beside this process's own variables."""
    site = os.environ.get(f"CROSSFILL_SITE_{engine.upper()}")
    if site is None:
        return {}
    values = {"PYTHONPATH": os.pathsep.join([str(ROOT), site, os.environ.get("PYTHONPATH", "")])}
    if engine == "mlx":  # it finds CUDA's libraries by the loader's path only
        folders = Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/lib")
        values["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, folders), os.environ.get("LD_LIBRARY_PATH", "")])
    return values


def settings(options: argparse.Namespace, engines: Sequence[str]) -> Settings:
    """One replica of each engine in both roles, or two with one each; policy `fail`: a silent recompute would pass
    for a handoff."""
    engine_settings = {
        "chunk_tokens": options.chunk,
        "kv_cache_bytes": 4 << 30,
        "prefix_cache_bytes": 1 << 30,
        "held_pages": 4096,
    }
    workers = [
        {
            "name": f"{engine}-{role}",
            "engine": engine,
            "role": role,
            "model": options.model,
            "env": environment(engine),
            "engine_settings": engine_settings,
        }
        for engine in engines
        for role in (("prefill", "decode") if engine in ONE_ROLE else ("both",))
    ]
    return Settings.model_validate(
        {
            "api": {"model": options.model, "port": free_port()},
            "broker": {"budget_bytes": options.budget_mib << 20},
            "handoff": {"failure_policy": "fail"},
            "workers": workers,
        }
    )


@contextmanager
def running(options: argparse.Namespace, engines: Sequence[str]) -> Iterator[tuple[Fleet, httpx.Client]]:
    with tempfile.TemporaryDirectory() as run:
        system = Fleet(settings(options, engines), Path(run), os.environ)
        try:
            system.start()
            for _ in system.wait_ready(READY_S):
                pass
            with httpx.Client(base_url=system.url, timeout=120) as client:
                yield system, client
        except BaseException:
            for child in system.children:
                print(f"--- the end of {child.name}'s log\n{child.tail()}", flush=True)
            raise
        finally:
            system.stop()


def complete(client: httpx.Client, model: str, prompt: list[int], route: str) -> dict[str, Any]:
    """Raises RuntimeError when the answer is an error."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": PAIR_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": secrets.token_hex(8),
    }
    answer = client.post("/v1/completions", json=body, headers={"X-Crossfill-Route": route, "X-Crossfill-Trace": "1"})
    if answer.status_code != 200:
        raise RuntimeError(f"{route} at {len(prompt)} tokens: {answer.text}")
    result: dict[str, Any] = answer.json()
    return result


def pairs(options: argparse.Namespace, engines: Sequence[str]) -> dict[str, Any]:
    rows = []
    vocabulary = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    with running(options, engines) as (_, client):
        for p, d in ((a, b) for a in engines for b in engines if a != b):
            for tokens in PAIR_LENGTHS:
                prompt = ttft.prompt(vocabulary, tokens, tokens)
                answer = complete(client, options.model.name, prompt, f"{p}->{d}")
                ours, trace = answer["choices"][0]["text"], answer["crossfill"]
                alone = {
                    engine: complete(client, options.model.name, prompt, f"local:{engine}")["choices"][0]["text"]
                    for engine in (p, d)
                    if engine not in ONE_ROLE
                }
                row = {
                    "route": f"{p}->{d}",
                    "prompt_tokens": tokens,
                    "pages": trace["pages"],
                    "imported_tokens": trace.get("imported_tokens"),
                    "characters": len(ours),
                    "leading_equal_to": {engine: _leading(ours, text) for engine, text in alone.items()},
                    "text": ours[:80],
                }
                print(json.dumps(row), flush=True)
                rows.append(row)
    return {"question": "is the text of a handoff the decode engine's own", "tokens": PAIR_TOKENS, "rows": rows}


def _leading(ours: str, theirs: str) -> int:
    """How many leading characters are equal."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))


def measure(options: argparse.Namespace, engines: Sequence[str]) -> dict[str, Any]:
    a, b = engines
    lengths = [int(n) for n in options.lengths.split(",")]
    routes = [f"local:{a}", f"local:{b}", f"{a}->{b}", f"{b}->{a}"]
    with running(options, engines) as (_, client):
        samples = ttft.measure(client, options.model, lengths, routes, options.samples)
    rows = ttft.summary(samples, a, b)
    for row in rows:
        ahead = [
            s.trace["marks_ms"] for s in samples if (s.route, s.prompt_tokens) == (row["route"], row["prompt_tokens"])
        ]
        row["first_page_before_prefill_end_ms"] = statistics.median(
            marks["prefill_ended"] - marks["first_page_out"] for marks in ahead
        )
        print(json.dumps({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return {
        "question": "TTFT of each engine alone and of both directions, on one GPU",
        "samples": options.samples,
        "rows": rows,
        "raw": [asdict(sample) for sample in samples],
    }


def machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = shutil.which(query[0]) is not None
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if found else "none"
    return {"gpu": gpu, "cores": os.cpu_count(), "python": sys.version.split()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pairs", "ttft"))
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--engines", default="vllm,mlx")
    parser.add_argument("--lengths", default="51,184,744,2844,8000,32000")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--budget-mib", type=int, default=256)
    options = parser.parse_args()
    engines = options.engines.split(",")
    result = (pairs if options.what == "pairs" else measure)(options, engines)
    about = {
        "machine": machine(),
        "model": "random FP16 weights, Qwen2.5-0.5B dimensions",
        "engines": engines,
        "chunk_tokens": options.chunk,
        "budget_mib": options.budget_mib,
    }
    options.result.write_text(json.dumps(about | result, indent=2) + "\n")
    print("written:", options.result)


if __name__ == "__main__":
    main()
