"""`make chaos`: one seeded run on processes of its own, ten minutes or 2000 requests, whichever ends first. One of the
decode replicas has a page server of its own, which is hurt like the others.

    python -m tests.chaos [--seed N] [--minutes M] [--requests N] [--directory DIR]

Prints what was done and what came of it; status 1 with every violation. History and logs stay in the directory.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from pipeline.sample import tiny
from tests.chaos.run import run
from tests.faults.rig import rig


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--directory", type=Path, default=Path(".run/chaos"))
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}; history and logs in {options.directory}", flush=True)
    model = options.directory / "tiny-llama"
    if not model.exists():
        tiny.write("llama", model)
    with rig(model, options.directory, own_pages=["d-0"]) as running:
        file = options.directory / f"history-{options.seed}.jsonl"
        verdict = run(running, options.seed, file, seconds=60 * options.minutes, requests=options.requests)
    print(verdict.summary)
    for violation in verdict.violations:
        print(f"VIOLATION {violation}", file=sys.stderr)
    print(f"seed {options.seed}: {len(verdict.violations)} violations")
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main())
