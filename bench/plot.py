"""Draws what is in `bench/results` for `docs/performance.md`: the pictures, and the tables between its markers.

Whatever results are there are taken up, those of a GPU (`gpu-*`) too; a bench that was never run has no picture.
Nothing is measured here.

    python -m bench.plot [--results bench/results] [--docs docs]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.report import RESULTS
from bench.tables import TABLES, Result, Results, gpu_runs

DOCS = Path(__file__).parent.parent / "docs"
BLUE, GREY, ORANGE, GREEN, RED = "#3b6fb6", "#b4bac4", "#d9822b", "#4b9b6b", "#b6403b"
COLOURS = (BLUE, ORANGE, GREEN, RED, GREY)
MARKER = re.compile(
    r"(<!-- (?P<kind>table|picture) (?P<name>[a-z]+): begin -->\n).*?(<!-- (?P=kind) (?P=name): end -->)", re.DOTALL
)


def read(folder: Path) -> Results:
    """Every result there is, by the name of its file."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def stream(results: Results) -> Figure | None:
    if "stream" not in results:
        return None
    rows = results["stream"]["rows"]
    figure, (axes,) = _figure(1, height=0.9 + 0.35 * len(rows))
    colours = [BLUE if row["transport"] == "Crossfill" else GREY for row in rows]
    axes.barh([row["transport"] for row in rows][::-1], [row["mb_per_s"] for row in rows][::-1], color=colours[::-1])
    axes.axvline(0.35 * rows[0]["mb_per_s"], color=RED, linewidth=1, linestyle="--")
    axes.set_xlabel("MB/s of pages over TCP on the loopback; dashed: 0.35 of plain TCP")
    return figure


def codec(results: Results) -> Figure | None:
    if "codec" not in results:
        return None
    figure, parts = _parted(results["codec"]["crossed"], "link", height=2.6)
    for axes, here in parts:
        colours = [GREY, *(BLUE for _ in here[1:-1]), ORANGE]
        axes.bar([row["codec"].replace(" ", "\n") for row in here], [row["mb_per_s"] for row in here], color=colours)
    parts[0][0].set_ylabel("MB/s of unpacked KV")
    return figure


def links(results: Results) -> Figure | None:
    if "links" not in results:
        return None
    figure, parts = _parted(results["links"]["rows"], "link", height=4.2)
    for axes, here in parts:
        labels = [f"{row['model']}\n{row['route']}\n{row['case']}" for row in here]
        places = range(len(here))
        axes.barh(places, [row["of_bound"] for row in here], color=BLUE)
        axes.axvline(1, color=RED, linewidth=1, linestyle="--")
        axes.set_yticks(places, labels, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("TTFT / its bound", fontsize=8)
    return figure


def load(results: Results) -> Figure | None:
    if "load" not in results:
        return None
    rows = [row for row in results["load"]["rows"] if "of_cached" in row]
    figure, (rates, waits) = _figure(2, height=0.9 + 0.35 * len(rows))
    names = [f"{row['case']}, C={row['clients']}" for row in rows]
    places = range(len(rows))
    colours = [BLUE if row["case"].startswith("handoff") else GREY for row in rows]
    rates.barh(places, [row["tokens_per_s"] for row in rows], color=colours)
    waits.barh(places, [row["ttft_p50_ms"] / 1e3 for row in rows], color=colours)
    rates.set_yticks(places, names, fontsize=7)
    waits.set_yticks([])
    rates.set_xlabel("tokens/s", fontsize=8)
    waits.set_xlabel("median TTFT, s", fontsize=8)
    for axes in (rates, waits):
        axes.invert_yaxis()
    return figure


def turns(results: Results) -> Figure | None:
    if "turns" not in results:
        return None
    figure, parts = _parted(results["turns"]["rows"], "route", height=2.8)
    for axes, here in parts:
        at = [row["turn"] for row in here]
        axes.plot(at, [row["ttft_ms"] for row in here], marker="o", color=BLUE, label="handoff")
        axes.plot(at, [row["prefill_alone_ms"] for row in here], marker="o", color=GREY, label="prefill engine alone")
        axes.set_xlabel("turn")
        axes.set_ylim(bottom=0)
    parts[0][0].set_ylabel("TTFT, ms")
    parts[0][0].legend(fontsize=7, frameon=False)
    return figure


def gpu(results: Results) -> Figure | None:
    """TTFT over prompt length, one picture a file of `ops/gpu/ttft.py`, but for those that a later one replaced."""
    found = dict(gpu_runs(results))
    if not found:
        return None
    figure, all_axes = _figure(len(found), height=3.0)
    for axes, (name, rows) in zip(all_axes, found.items(), strict=True):
        for colour, route in zip(COLOURS, dict.fromkeys(row["route"] for row in rows), strict=False):
            here = [row for row in rows if row["route"] == route]
            tokens = [row["prompt_tokens"] for row in here]
            axes.plot(tokens, [row["ttft_ms"] for row in here], marker="o", markersize=3, color=colour, label=route)
            alone = [row["prefill_alone_ms"] for row in here]
            axes.plot(tokens, alone, linestyle="--", linewidth=1, color=colour)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("prompt tokens", fontsize=8)
        axes.legend(fontsize=7, frameon=False)
    all_axes[0].set_ylabel("TTFT, ms; dashed: P alone")
    return figure


def _parted(rows: list[Result], by: str, height: float) -> tuple[Figure, list[tuple[Axes, list[Result]]]]:
    """A picture for each value of the field `by`, under that name, and the rows that belong into it."""
    names = list(dict.fromkeys(row[by] for row in rows))
    figure, all_axes = _figure(len(names), height)
    for axes, name in zip(all_axes, names, strict=True):
        axes.set_title(name, fontsize=9)
    return figure, [
        (axes, [row for row in rows if row[by] == name]) for axes, name in zip(all_axes, names, strict=True)
    ]


def _figure(columns: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(7.6, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = [figure.add_subplot(1, columns, place + 1) for place in range(columns)]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, all_axes


class Picture(NamedTuple):
    """What draws it, and what it shows."""

    draw: Callable[[Results], Figure | None]
    caption: str


PICTURES = {
    "stream": Picture(stream, "Throughput of pages"),
    "codec": Picture(codec, "KV per second over links"),
    "links": Picture(links, "Time to first token over slow links"),
    "load": Picture(load, "Tokens per second under load"),
    "turns": Picture(turns, "Turns of a chat"),
    "gpu": Picture(gpu, "Time to first token on a GPU"),
}


def fill(page: str, results: Results) -> str:
    """The page with its tables drawn anew, and its pictures in place as far as there are results for them.

    Raises KeyError for a marker that neither belongs to.
    """
    return MARKER.sub(lambda found: f"{found[1]}\n{_part(found['kind'], found['name'], results)}\n{found[4]}", page)


def _part(kind: str, name: str, results: Results) -> str:
    if kind == "table":
        return TABLES[name](results)
    picture = PICTURES[name]
    if picture.draw(results) is None:
        return "*Not measured yet.*\n"
    return f"![{picture.caption}](images/perf-{name}.png)\n"


def draw(results: Results, docs: Path) -> list[Path]:
    """Write pictures and tables; what was written."""
    written = []
    for name, picture in PICTURES.items():
        if figure := picture.draw(results):
            written.append(docs / "images" / f"perf-{name}.png")
            figure.savefig(written[-1], metadata={"Software": None})
    page = docs / "performance.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    return [*written, page]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    for path in draw(read(options.results), options.docs):
        print("written:", path)


if __name__ == "__main__":
    main()
