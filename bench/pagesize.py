"""Does the size of a page matter: would it pay to split large pages, or to group small ones into one value? The same
bytes cross in pages of several sizes, ours through a broker beside plain TCP, in one run.

CPU of both ends is about `fixed per page + bytes * per byte`. The smallest page has next to no bytes: its CPU per page
is what the control of a page costs, nearly all of it Python that holds its interpreter's lock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from bench import ending, report
from bench.pair import Measured, Pair
from bench.server import server
from bench.stream import OURS, TCP, TRANSPORTS, Task
from pipeline.page import PageShape
from pipeline.settings import MIB

KIB = 1024
SIZES = (4, 64, 192, 768, 1536, 4096, 12288)  # KiB
SMALLEST_PAGES = 16
COLUMNS = ("page_kib", "tcp_mb_per_s", "mb_per_s", "of_tcp", "cpu_s_per_gb", "cpu_us_per_page")


def shape(kib: int) -> PageShape:
    """A page of `kib` KiB: layers of one head of dimension 16 have 4 KiB."""
    return PageShape(layers=kib // 4, kv_heads=1, head_dim=16)


def pages(kib: int, moved_mib: int) -> int:
    """Of a transfer; fewer bytes where pages are so small that only their number counts."""
    return max(SMALLEST_PAGES, min(moved_mib * KIB // kib, 8 * moved_mib))


def row(kib: int, ours: list[Measured], tcp: list[Measured], number: int) -> dict[str, Any]:
    """Medians of the runs with pages of one size."""

    def rate(runs: list[Measured]) -> float:
        return statistics.median(run.moved_bytes / run.wall_s / 1e6 for run in runs)

    cpu_s = statistics.median(run.cpu_s for run in ours)
    values = (
        kib,
        round(rate(tcp), 1),
        round(rate(ours), 1),
        round(rate(ours) / rate(tcp), 3),
        round(cpu_s / ours[0].moved_bytes * 1e9, 3),
        round(cpu_s / number * 1e6, 1),
    )
    return dict(zip(COLUMNS, values, strict=True))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every size `repeats` times, in turn, so that what disturbs the machine disturbs all."""
    taken: dict[tuple[int, str], list[Measured]] = {(kib, name): [] for kib in options.sizes for name in (TCP, OURS)}
    budget_bytes = max(256 * MIB, 32 * KIB * max(options.sizes))
    with tempfile.TemporaryDirectory() as directory, server(Path(directory), budget_bytes) as url, Pair() as pair:
        for number in range(options.repeats + 1):
            for (kib, name), runs in taken.items():
                task = Task(url, pages(kib, options.mib), options.seed, uuid.uuid4().hex, shape(kib))
                measured = pair.measure(name, TRANSPORTS[name], task)
                runs += [measured] if number else []  # the first imports what it needs
    return {
        "question": "what pages of different sizes cost",
        "options": report.options(options),
        "rows": [row(kib, taken[kib, OURS], taken[kib, TCP], pages(kib, options.mib)) for kib in options.sizes],
        "targets": [],
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.pagesize", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="KiB, multiples of 4")
    parser.add_argument("--mib", type=int, default=96, help="MiB per transfer (default 96)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    with ending.orderly():
        result = run(parse(sys.argv[1:]))
    report.table("Pages of different sizes", COLUMNS, [list(map(str, row.values())) for row in result["rows"]])
    print("written:", report.save("pagesize", result))


if __name__ == "__main__":
    main()
