"""`make fuzz`: fuzz frames and records in several processes, then print what was done and how long it took.

    python -m tests.fuzz [--frames N] [--records N] [--seed N] [--processes N]

Status 1 with the frame or record that broke something; the same seed shows it again.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.fuzz import records
from tests.fuzz.frames import Feeder

CHUNK = 50_000  # of one seed


def frames(seed: int, count: int) -> Counter[str]:
    """One chunk: what was fed by mutation, and what came of it."""
    feeder = Feeder(seed)
    feeder.run(count)
    done = Counter({f"fed {name}": number for name, number in feeder.fed.items()})
    return done + Counter({f"frame {name}": number for name, number in feeder.outcome.items()})


def _quiet() -> None:
    logging.disable()  # a refused record is logged, a million would be


def _chunks(total: int, seed: int) -> Iterator[tuple[int, int]]:
    for at in range(0, total, CHUNK):
        yield seed + at, min(CHUNK, total - at)


def _call(work: object, chunk: tuple[int, int]) -> Counter[str]:
    return work(*chunk)  # type: ignore[operator,no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--frames", type=int, default=10_000_000)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    start, seen = time.monotonic(), Counter[str]()
    print(f"seed {options.seed}: {options.frames} frames, {options.records} records", flush=True)
    with ProcessPoolExecutor(options.processes, initializer=_quiet) as pool:
        try:
            for work, total in ((frames, options.frames), (records.run, options.records)):
                for done in pool.map(partial(_call, work), _chunks(total, options.seed)):
                    seen += done
        except AssertionError as broken:
            pool.shutdown(cancel_futures=True)
            print(f"seed {options.seed}: {broken}", file=sys.stderr)
            return 1
    for name, count in sorted(seen.items()):
        print(f"{count:>12,}  {name}")
    accepted = sum(count for name, count in seen.items() if name in ("frame page", "frame commit"))
    print(f"{options.frames:,} frames and {options.records:,} records in {time.monotonic() - start:.0f} s: no crash;")
    print(f"{accepted:,} pages and commits came out, each with the digest that follows from the prompt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
