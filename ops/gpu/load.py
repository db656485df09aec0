"""Many clients at once on one GPU, at the full size: tokens/s of a handoff against D alone and D's own server.

    python -m ops.gpu.load MODEL RESULT.json --engines mlx,vllm [--at RUN.json] [--clients 16,64] [--rounds 4]

`bench/load.py` with its prompts and its cases: the first engine prefills, the second decodes. vLLM's own server runs
where D is vLLM, with its engine set up as ours is (graphs for decode steps, no compiler) and its prompts cached.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench import load, own, report
from bench.load import CACHED, HANDOFF, OWN, PREFILL, Bounds, Run
from bench.own import Own
from ops.gpu import system
from pipeline.cli import machine

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # as `pipeline.engines.vllm.engine.graphs` has it


def vllm_server(options: argparse.Namespace, directory: Path) -> AbstractContextManager[Own]:
    """vLLM's own server on the same GPU. Raises RuntimeError when it ends, or is not ready in time."""
    python = machine.interpreters(Path(), Path(sys.prefix)).get("vllm", Path(sys.executable))
    more = ["--dtype", "float16", "--max-num-batched-tokens", str(options.chunk)]
    more += ["--kv-cache-memory-bytes", str(options.kv_mib << 20), "--gpu-memory-utilization", "0.05"]
    more += ["--compilation-config", json.dumps(GRAPHS)]
    env = system.environment("vllm", directory)
    return own.launched(python, options.model, options.running, more, env, directory)


class Bench:
    """Every case of one number of clients, over fresh prompts in each round."""

    def __init__(self, url: str, theirs: str | None, options: argparse.Namespace) -> None:
        self._url = url
        self._own = theirs
        self._options = options
        self._tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        self._p, self._d = options.engines.split(",")[:2]

    def rows(self, clients: int) -> list[dict[str, Any]]:
        taken: dict[str, Run] = {}
        for number in range(self._options.rounds + 1):
            found = self._round(clients, number)
            if number:  # the first one compiles and captures what the others use
                taken = {case: taken[case] + run if case in taken else run for case, run in found.items()}
        bounds = Bounds(self._options.ttft_ms, self._options.tpot_ms)
        return load.compare({case: load.row(run, clients, bounds) for case, run in taken.items()}, self._options.answer)

    def _round(self, clients: int, number: int) -> dict[str, Run]:
        options, salt = self._options, f"{clients}-{number}"
        shortest, longest = (int(n) for n in options.prompts.split(","))
        count = clients * options.waves
        asked = load.prompts(self._tokenizer, count, shortest, longest, options.seed + clients + 1000 * number)
        found = {
            HANDOFF: self._run(self._url, asked, f"{self._p}->{self._d}", clients, options.answer, salt),
            CACHED: self._run(self._url, asked, f"local:{self._d}", clients, options.answer, salt),
        }
        if self._own:
            self._run(self._own, asked, OWN, clients, 1, salt)
            found[OWN] = self._run(self._own, asked, OWN, clients, options.answer, salt)
        found[PREFILL] = self._run(self._url, asked, f"local:{self._p}", clients, 1, f"p-{salt}")
        rates = {case: round(sum(s.tokens for s in run.samples) / run.seconds, 1) for case, run in found.items()}
        print(clients, "clients:", json.dumps(rates), flush=True)
        return found

    def _run(self, url: str, asked: list[list[int]], route: str, clients: int, answer: int, salt: str) -> Run:
        return Run(*load.drive(url, self._options.model.name, asked, route, clients, answer, salt), d_cpu_s=1.0)


def main() -> None:
    parser = system.arguments(__doc__)
    parser.add_argument("--clients", default="16")
    parser.add_argument("--own", choices=("yes", "no"), default="yes", help="vLLM's own server, too, where D is vLLM")
    parser.add_argument("--waves", type=int, default=4, help="prompts of each client in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", default="200,2000")
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--tpot-ms", type=float, default=50.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, system.opened(options) as running:
        if options.own == "yes" and options.engines.split(",")[1] == "vllm":
            with vllm_server(options, Path(name)) as theirs:
                measure(running.url, theirs.url, options)
        else:
            measure(running.url, None, options)


def measure(url: str, theirs: str | None, options: argparse.Namespace) -> None:
    """Print and save the rows. CPU of D is not counted here: the GPU does its work."""
    bench, rows = Bench(url, theirs, options), []
    for clients in (int(n) for n in options.clients.split(",")):
        rows += [{name: value for name, value in row.items() if "cpu" not in name} for row in bench.rows(clients)]
        for row in rows[-4:]:
            print(json.dumps(row), flush=True)
    asked = {name: getattr(options, name) for name in ("prompts", "answer", "waves", "rounds", "running", "seed")}
    result = {"question": "tokens/s under load, on one GPU", "options": asked, "rows": rows}
    system.save(options, result | {"targets": report.rows(load.targets(rows))})


if __name__ == "__main__":
    main()
