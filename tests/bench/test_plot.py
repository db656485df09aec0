"""Pictures and tables of docs/performance.md: whatever results are there, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import limit, plot, tables

PAGE = """# Title
<!-- table targets: begin -->
old
<!-- table targets: end -->
between
<!-- table gpu: begin -->
<!-- table gpu: end -->
<!-- picture turns: begin -->
<!-- picture turns: end -->
"""
TARGET = {"what": "regret", "measured": 1.2706, "target": "<= 10", "unit": "%", "reached": True}
GPU_ROW = {"route": "a->b", "prompt_tokens": 51, "prefill_alone_ms": 100.0, "ttft_ms": 130.0, "added_ms": 20.0}


def test_tables_replace_what_stood_between_the_markers_and_only_that() -> None:
    results: tables.Results = {
        "router": {"targets": [TARGET]},
        "gpu-ttft-a-b": {"rows": [GPU_ROW | {"prompt_tokens": 184}, GPU_ROW]},  # in the order they were measured
        "gpu-ttft-a-b-earlier": {"rows": [1]},
    }
    page = plot.fill(PAGE, results)
    assert "old" not in page
    assert "between" in page
    assert "| router | regret | 1.27 % | <= 10 | yes |  |\n" in page
    row = "| a-b | a->b | {} | 100.0 | 130.0 | 20.0 | <= 18.0 | **no** |\n"
    assert row.format(51) + row.format(184) in page
    assert "*Not measured yet.*" in page
    assert plot.fill(page, results) == page


def test_a_marker_without_a_table_is_an_error() -> None:
    for kind in ("table", "picture"):
        with pytest.raises(KeyError, match="other"):
            plot.fill(f"<!-- {kind} other: begin -->\n<!-- {kind} other: end -->", {})


def test_what_was_never_measured_has_no_picture() -> None:
    assert [picture.draw({}) for picture in plot.PICTURES.values()] == [None] * len(plot.PICTURES)


def test_pictures_are_drawn_from_every_result(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "performance.md").write_text(PAGE)
    load = {"clients": 1, "case": "handoff", "tokens_per_s": 5.0, "ttft_p50_ms": 9.0, "of_cached": 0.5}
    turn = {"turn": 1, "route": "a->b", "ttft_ms": 5.0, "prefill_alone_ms": 4.0}
    link = {"model": "m", "link": "slow", "route": "a->b", "case": "new", "of_bound": 1.25}
    crossed = [{"link": "slow", "codec": name, "mb_per_s": 5.0} for name in ("plain TCP", "raw", "auto")]
    for name, result in {
        "stream": {"rows": [{"transport": "plain TCP", "mb_per_s": 5.0}, {"transport": "Crossfill", "mb_per_s": 2.0}]},
        "codec": {"crossed": crossed},
        "links": {"rows": [link]},
        "load": {"rows": [load]},
        "turns": {"rows": [turn]},
        "gpu-ttft-a-b": {"rows": [GPU_ROW]},
    }.items():
        (results / f"{name}.json").write_text(json.dumps(result))
    plot.main(["--results", str(results), "--docs", str(tmp_path)])
    drawn = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert drawn == sorted(f"perf-{name}.png" for name in plot.PICTURES)
    assert all((tmp_path / "images" / name).read_bytes().startswith(b"\x89PNG") for name in drawn)
    page = (tmp_path / "performance.md").read_text()
    assert "| a-b | a->b | 51 |" in page
    assert "![Turns of a chat](images/perf-turns.png)" in page


def test_what_limits_stands_beside_what_was_missed() -> None:
    what = "throughput of pages, of plain TCP"
    missed = TARGET | {"what": what, "reached": False}
    (line,) = [line for line in tables.targets({"stream": {"targets": [missed]}}).splitlines() if "plain TCP" in line]
    assert line.endswith(f"| **no** | {limit.of('stream', what)} |")
    assert limit.of("stream", what)
    assert limit.of("nothing", "at all") == ""


def test_second_turns_in_one_table() -> None:
    row = {"model": "m", "link": "slow", "route": "a->b", "samples": 9, "held_tokens": 128, "pages": 1}
    times = {"prefill_alone_ms": 200.0, "ttft_ms": 260.0, "added_ms": 50.0, "wire_ms": 30.0, "reached": True}
    *_, line = tables.second({"turns": {"second": [row | times]}}).splitlines()
    assert line == "| turns | m | slow | a->b | 9 | 128 | 1 | 200 | 260 | 50 | 30 | yes |"


def test_what_handoffs_add() -> None:
    row = {"model": "m", "prompt_tokens": 744, "route": "a->b", "samples": 5, "prefill_alone_ms": 100.0}
    times = {"decode_alone_ms": 90.0, "ttft_ms": 127.4, "added_ms": 17.4, "target_ms": 18.0, "reached": True}
    *_, line = tables.first({"ttft": {"rows": [row | times]}}).splitlines()
    assert line == "| m | 744 | a->b | 5 | 100 | 90 | 127 | 17 | 18 | yes |"


def test_rows_of_a_gpu_that_name_no_model_and_no_link() -> None:
    row = {"route": "a->b", "rounds": 9, "held_tokens": 128, "pages": 1, "prefill_alone_ms": 20.0, "ttft_ms": 60.0}
    *_, line = tables.second({"gpu-turns": {"second": [row | {"added_ms": 25.1}]}}).splitlines()
    assert line == "| gpu-turns |  | loopback | a->b | 9 | 128 | 1 | 20 | 60 | 25 | 0 | **no** |"
    link = {"link": "slow", "route": "a->b", "case": "new", "megabytes": 1.0, "reached": True}
    times = {"prefill_ms": 1.0, "wire_ms": 2.0, "ttft_ms": 3.0, "target_ms": 6.0}
    *_, line = tables.crossed({"gpu-links": {"rows": [link | times]}}).splitlines()
    assert line == "| gpu-links |  | slow | a->b | new |  | 1.0 | 1 | 2 | 3 | 6 | 0.50 | yes |"


def test_a_table_without_results_has_its_head_alone() -> None:
    assert [len(table({}).splitlines()) for table in tables.TABLES.values()] == [2] * len(tables.TABLES)


def test_rows_of_links_load_and_memory() -> None:
    link = {"model": "m", "link": "slow", "route": "a->b", "case": "new", "samples": 5, "megabytes": 17.69}
    times = {"prefill_ms": 200.0, "wire_ms": 100.0, "ttft_ms": 230.0, "target_ms": 245.0}
    assert "| links | m | slow | a->b | new | 5 | 17.7 | 200 | 100 | 230 | 245 | 1.02 | **no** |" in tables.crossed(
        {"links": {"rows": [link | times | {"of_bound": 1.021, "reached": False}]}}
    )
    load = {"clients": 16, "case": "handoff", "requests": 64, "tokens_per_s": 5.0, "of_cached": 0.5, "of_limit": 0.9}
    there = {
        "gpu-load-mlx-vllm": {"rows": [load | {"clients": 64}]},
        "load": {"rows": [load | {"d_cpu_ms_per_token": 12.3}]},
    }
    assert tables.loads(there).splitlines()[2:] == [
        "| load | 16 | handoff | 64 | 5.0 |  | 0.50 | 0.90 |  | 12.3 |",
        "| gpu-load-mlx-vllm | 64 | handoff | 64 | 5.0 |  | 0.50 | 0.90 |  |  |",
    ]
    names = ("bare_rest", "worker_rest", "bare_peak", "worker_peak", "over", "allowed")
    peaks = {f"{name}_mib": float(at) for at, name in enumerate(names)}
    assert "| mlx | 0 | 1 | 2 | 3 | 4 | 5 |" in tables.memory({"memory": {"rows": [peaks | {"engine": "mlx"}]}})


def test_the_cost_of_the_edge_beside_others() -> None:
    row = {"request_cpu_ms": 2.345, "token_cpu_us": 51.2, "tokens_per_s": 400.4, "gap_max_ms": 99.9}
    rows = {"floor": row | {"gap_median_ms": 50.0, "streams": 16}}
    table = tables.edge({"gpu-api": {"rows": {"crossfill": row | {"gap_median_ms": 8.0}}}, "api": {"rows": rows}})
    assert table.splitlines()[2:] == [
        "| api | floor | 2.35 | 51 | 16 | 400 | 100 | 50 |",
        "| gpu-api | crossfill | 2.35 | 51 | 200 | 400 | 100 | 8 |",
    ]
