"""What does each codec give, and what does it cost? Real KV pages, real links, and for the lossy one real text.

Rates are per core and of unpacked bytes, median over repeats in turn. Then the same pages cross the broker, sender at
the far end of a link, once for every codec: a codec earns its place where more KV arrives in a second. `auto` must
never be slower than `raw` on a fast link and find the better lossless one on a slow link. The shaped links take root.

    python -m bench.codec [--engine reference|mlx] [--context 512] [--continuation 64] [--repeats 5] [--links yes]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench import ending, link, quality, report, stream
from bench.fleet import versions
from bench.pair import Measured, Pair
from bench.report import Target
from bench.server import server
from bench.stream import Task
from pipeline import engines
from pipeline.codec import CODECS
from pipeline.engines.reference.model import Model
from pipeline.page import Page, PageShape
from pipeline.settings import MIB, EngineSettings

RATES = ("codec", "lossy", "ratio", "encode_mb_per_s", "decode_mb_per_s", "cpu_s_per_gb")
CROSSED = ("link", "codec", "mb_per_s", "wire_ratio", "cpu_s_per_gb")
CHANGED = (
    "text",
    "relative_rms",
    "kl_mean",
    "kl_max",
    "best_equal",
    "nll",
    "nll_added",
    "greedy_equal",
    "greedy_leading",
)
LOOPBACK = "loopback"
CROSSING = ("raw", "zstd", "int8", "auto")
NOISE = 0.9  # of `raw` or the better codec: what two medians of one run differ by anyway
MOST_KL, LEAST_EQUAL = 0.01, 0.98  # where `int8` is called harmless: nats a token, share of best tokens


def rates(pages: Sequence[Page], repeats: int) -> list[dict[str, Any]]:
    """Every codec over all pages, `repeats` times in turn."""
    datas = [page.data.reshape(-1).view(np.uint8).data for page in pages]
    dim, total = pages[0].data.shape[-1], sum(map(len, datas))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in CODECS}
    packed_bytes = {}
    for _ in range(repeats):
        for name, codec in CODECS.items():
            start = time.process_time()
            packed = [codec.encode(data, dim) for data in datas]
            between = time.process_time()
            for payload, data in zip(packed, datas, strict=True):
                codec.decode(payload, len(data), dim)
            taken[name].append((between - start, time.process_time() - between))
            packed_bytes[name] = sum(map(len, packed))
    rows = []
    for name, times in taken.items():
        encode, decode = (max(statistics.median(each), 1e-9) for each in zip(*times, strict=True))
        row: dict[str, Any] = {"codec": name, "lossy": CODECS[name].lossy, "ratio": total / packed_bytes[name]}
        row |= {"encode_mb_per_s": total / encode / 1e6, "decode_mb_per_s": total / decode / 1e6}
        rows.append(row | {"cpu_s_per_gb": (encode + decode) / total * 1e9})
    return rows


def by_layer(pages: Sequence[Page]) -> list[float]:
    """What `zstd` makes of each layer alone: first layers and last ones do not shrink alike."""
    codec, found = CODECS["zstd"], []
    for layer in range(pages[0].data.shape[0]):
        data = np.stack([page.data[layer] for page in pages])
        raw = data.reshape(-1).view(np.uint8).data
        found.append(len(raw) / len(codec.encode(raw, data.shape[-1])))
    return found


@contextmanager
def links(shaped: bool) -> Iterator[dict[str, link.Link | None]]:
    """The loopback, and every shaped link there is."""
    with ExitStack() as stack:
        found: dict[str, link.Link | None] = {LOOPBACK: None}
        if shaped:
            found |= {
                name: stack.enter_context(link.shaped(rate, number))
                for number, (name, rate) in enumerate(link.SHAPED.items())
            }
        yield found


def crossing(pages: Sequence[Page], count: int, repeats: int, shaped: bool) -> list[dict[str, Any]]:
    """`count` pages over every link with every codec, in turn; on the loopback four times as many."""
    rows: list[dict[str, Any]] = []
    shape = PageShape(*(pages[0].data.shape[axis] for axis in (0, 2, 4)))
    with tempfile.TemporaryDirectory() as directory, links(shaped) as found:
        source = Path(directory) / "pages.npy"
        np.save(source, np.stack([page.data for page in pages if page.tokens == 64]))
        for name, each in found.items():
            runs: dict[str, list[Measured]] = {codec: [] for codec in (stream.TCP, *CROSSING)}
            many = count if each else 4 * count
            with (
                server(Path(directory) / f"link-{len(rows)}", 256 * MIB, each) as url,
                Pair(each.enter if each else None) as pair,
            ):
                for _ in range(repeats):
                    for codec in runs:
                        plain = codec == stream.TCP
                        task = Task(url, many, 0, uuid.uuid4().hex, shape, "raw" if plain else codec, source, each)
                        transport = codec if plain else stream.OURS
                        runs[codec].append(pair.measure(codec, stream.TRANSPORTS[transport], task))
            rows += [{"link": name, "codec": codec, **_median(measured)} for codec, measured in runs.items()]
    return rows


def _median(runs: Sequence[Measured]) -> dict[str, float]:
    return {
        "mb_per_s": statistics.median(run.moved_bytes / run.wall_s / 1e6 for run in runs),
        "wire_ratio": statistics.median(run.moved_bytes / run.wire_bytes for run in runs),
        "cpu_s_per_gb": statistics.median(run.cpu_s / run.moved_bytes * 1e9 for run in runs),
    }


def targets(crossed: Sequence[dict[str, Any]], changed: Sequence[dict[str, Any]]) -> list[Target]:
    rate = {(row["link"], row["codec"]): row["mb_per_s"] for row in crossed}
    found = []
    for name in dict.fromkeys(row["link"] for row in crossed):
        better = rate[name, "raw"] if name == LOOPBACK else max(rate[name, "raw"], rate[name, "zstd"])
        against = "raw" if name == LOOPBACK else "the better of raw and zstd"
        what = f"auto on {name}, of {against}"
        found.append(Target(what, rate[name, "auto"] / better, NOISE, "x", at_least=True))
    if changed:
        kl = statistics.mean(row["kl_mean"] for row in changed)
        equal = statistics.mean(row["best_equal"] for row in changed)
        found.append(Target("int8: KL to the exact logits", kl, MOST_KL, "nats/token"))
        found.append(Target("int8: best token equal", equal, LEAST_EQUAL, "of tokens", at_least=True))
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    passages = quality.passages(options.model, options.context, options.continuation)
    engine = engines.load(options.engine, options.model, EngineSettings())
    try:
        exact = [quality.export(engine, passage.context) for passage in passages]
        print("pages are there", flush=True)
        model = Model.load(options.model)
        changed = quality.report(engine, model, passages, exact, CODECS["int8"])
    finally:
        engine.close()
    print("int8 is judged", flush=True)
    pages = [page for each in exact for page in each if page.tokens == 64]
    shaped = options.links == "yes" and not link.missing()
    crossed = crossing(pages, options.pages, options.repeats, shaped)
    return {
        "question": "what each codec gives and costs, and what int8 changes",
        "options": report.options(options),
        "engines": versions((options.engine,)),
        "pages": len(pages),
        "page_bytes": pages[0].data.nbytes,
        "shaped_links": shaped or link.missing() or "not asked for",
        "rows": rates(pages, options.repeats),
        "zstd_ratio_by_layer": [round(ratio, 3) for ratio in by_layer(pages)],
        "crossed": crossed,
        "int8": changed,
        "targets": report.rows(targets(crossed, changed)),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="reference", help="whose pages, and who decodes them")
    parser.add_argument("--context", type=int, default=513, help="tokens of each text that are prefilled")
    parser.add_argument("--continuation", type=int, default=64)
    parser.add_argument("--pages", type=int, default=64, help="per crossing of a slow link")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--links", choices=("yes", "no"), default="yes", help="shaped ones, too")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    return parser.parse_args(arguments)


def main() -> None:
    with ending.orderly():
        result = run(parse(sys.argv[1:]))
    for title, columns, rows in (
        ("codecs on real pages, one core", RATES, result["rows"]),
        ("KV over links", CROSSED, result["crossed"]),
        ("what int8 changes", CHANGED, result["int8"]),
    ):
        report.table(title, columns, [[row[column] for column in columns] for row in rows])
    report.finish("codec", result)


if __name__ == "__main__":
    main()
