"""Slow links with engines on a GPU: the prefill engine behind a relay of 85 MB/s and of 1 Gb/s, in a system of its own.

    python -m ops.gpu.links MODEL RESULT.json --engines vllm,mlx [--lengths 744,2844,8000] [--samples 3] [--rounds 7]

`bench/links.py` with its cases and bounds, but paced by a relay in this process (`pacer.py`) instead of the kernel's
`tc`; all the others have cores of their own there. The wire's rate is that of plain TCP through the same relay.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import fleet, link, links, report, turns
from bench.client import Sample
from bench.server import server
from bench.ttft import prompt
from ops.gpu import system
from ops.gpu.pacer import Pacer
from pipeline.settings import Settings

PROBE_BYTES = 32 << 20


@contextmanager
def behind(options: argparse.Namespace, pacer: Pacer) -> Iterator[system.System]:
    """A system whose first engine reaches the broker through `pacer` only."""
    far, near = options.engines.split(",")
    with tempfile.TemporaryDirectory() as name, server(Path(name), options.budget_mib << 20) as url:
        host = urlsplit(url)
        pacer.target = int(host.port or 0)
        through = url.replace(f":{pacer.target}", f":{pacer.port}")
        made = system.settings(options, [far, near], Path(name)).model_dump(mode="json", exclude_unset=True)
        made["broker"]["url"] = url
        made["workers"][0]["env"] |= {"CROSSFILL_BROKER__URL": through}
        with (
            fleet.running(Settings.model_validate(made), Path(name)) as made_up,
            closing(system.System(made_up.url, url, options.model)) as found,
        ):
            yield found


def tcp_rate(pacer: Pacer) -> float:
    """Bytes/s of plain TCP through it."""
    target = pacer.target
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pacer.target = listener.getsockname()[1]
        took: list[float] = []
        thread = threading.Thread(target=lambda: took.append(_drain(listener)))
        thread.start()
        with socket.create_connection(("127.0.0.1", pacer.port)) as sender:
            began = time.monotonic()
            sender.sendall(bytes(PROBE_BYTES))
        thread.join()
    pacer.target = target
    return PROBE_BYTES / (took[0] - began)


def _drain(listener: socket.socket) -> float:
    """When the last byte was there."""
    with listener.accept()[0] as origin:
        while origin.recv(1 << 20):
            pass
    return time.monotonic()


def crossed(running: system.System, pacer: Pacer, rates: dict[str, float], options: argparse.Namespace) -> list[Any]:
    a, b = options.engines.split(",")
    asker = turns.Asker.of(running.http, options.model)
    visits: dict[tuple[str, int, str, str], list[links.Visit]] = {}
    cases = list(product(rates, (int(n) for n in options.lengths.split(",")), ((a, b), (b, a))))
    for trial in range(options.samples + 1):
        for name, length, (p, d) in cases:
            pacer.rate = link.SHAPED[name]
            ids = prompt(asker.tokenizer, 100 * options.seed + trial, length)
            taken = links.visit(asker, ids, p, d, trial)
            if trial:  # the first of each length compiles
                visits.setdefault((name, length, p, d), []).append(taken)
    model = {"model": options.model.name}
    return [model | row for (name, *_), each in visits.items() for row in links.rows(name, rates[name], each)]


def later(running: system.System, pacer: Pacer, rates: dict[str, float], options: argparse.Namespace) -> list[Any]:
    a, b = options.engines.split(",")
    second = turns.Second(turns.Asker.of(running.http, options.model), options, options.held)
    second.warm()
    taken: dict[str, list[dict[str, Sample]]] = {name: [] for name in rates}
    for number in range(options.rounds):
        for name, found in taken.items():
            pacer.rate = link.SHAPED[name]
            found.append(second.round(number))
    return [
        {"model": options.model.name, "link": name} | row
        for name, found in taken.items()
        for row in turns.seconds(found, a, b, rates[name])
    ]


def main() -> None:
    parser = system.arguments(__doc__)
    parser.add_argument("--lengths", default="744,2844,8000")
    for name, value in {"samples": 3, "more": 96, "answer": links.ANSWER, "held": 2800, "rounds": 9, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with Pacer() as pacer, behind(options, pacer) as running:
        rates = {}
        for name, rate in link.SHAPED.items():
            pacer.rate = rate
            rates[name] = tcp_rate(pacer)
        print(json.dumps(rates), flush=True)
        talked = later(running, pacer, rates, options)
        rows = crossed(running, pacer, rates, options)
    for row in rows + talked:
        print(json.dumps(row), flush=True)
    found = {"question": "what a slow link adds, on one GPU", "tcp_bytes_per_s": rates, "rows": rows, "turns": talked}
    system.save(options, found | {"targets": report.rows(links.targets(rows) + turns.targets(talked))})


if __name__ == "__main__":
    main()
