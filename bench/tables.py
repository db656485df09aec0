"""Tables of `docs/performance.md`, from results of benches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench import limit, ttft, turns
from bench.report import Target

Result = dict[str, Any]
Results = dict[str, Result]


def targets(results: Results) -> str:
    """Every target that any bench states, what was measured, and what stands in the way of those that were missed."""
    lines = _head("bench", "what", "measured", "target", "reached", "what limits it")
    for name, result in results.items():
        for row in result.get("targets", ()):
            why = "" if row["reached"] else limit.of(name, row["what"])
            measured, verdict = f"{row['measured']:.3g} {row['unit']}", _verdict(row["reached"])
            lines.append(_row(name, row["what"], measured, row["target"], verdict, why))
    return "\n".join(lines) + "\n"


def first(results: Results) -> str:
    """TTFT of handoffs beside the prefill engine's own."""
    names = ("model", "prompt", "route", "rounds", "P alone, ms", "D alone", "handoff", "added", "may add", "reached")
    lines = _head(*names)
    for row in results.get("ttft", {}).get("rows", ()):
        fields = ("prefill_alone_ms", "decode_alone_ms", "ttft_ms", "added_ms", "target_ms")
        times = (f"{row[field]:.0f}" for field in fields)
        what = (row["model"], row["prompt_tokens"], row["route"], row["samples"])
        lines.append(_row(*what, *times, _verdict(row["reached"])))
    return "\n".join(lines) + "\n"


def crossed(results: Results) -> str:
    """TTFT over slow links, on this machine and on a GPU."""
    names = ("run", "model", "link", "route", "case", "prompts", "MB", "P alone", "wire", "TTFT", "bound, ms")
    lines = _head(*names, "of it", "reached")
    for run, row in _runs(results, "links", "rows"):
        times = (f"{row[what]:.0f}" for what in ("prefill_ms", "wire_ms", "ttft_ms", "target_ms"))
        what = (row["model"], row["link"], row["route"], row["case"], row["samples"], f"{row['megabytes']:.1f}")
        lines.append(_row(run, *what, *times, f"{row['of_bound']:.2f}", _verdict(row["reached"])))
    return "\n".join(lines) + "\n"


def second(results: Results) -> str:
    """Second turns of a chat, on this machine and on a GPU."""
    names = ("run", "model", "link", "route", "turns", "held", "pages", "P alone, ms", "TTFT, ms", "added", "wire")
    lines = _head(*names, "reached")
    for run, row in (*_runs(results, "turns", "second"), *_runs(results, "links", "turns")):
        times = (f"{row[what]:.0f}" for what in ("prefill_alone_ms", "ttft_ms", "added_ms", "wire_ms"))
        what = (row["model"], row["link"], row["route"], row["samples"], row["held_tokens"], row["pages"])
        lines.append(_row(run, *what, *times, _verdict(row["reached"])))
    return "\n".join(lines) + "\n"


def memory(results: Results) -> str:
    """Peaks of workers over their engines'."""
    lines = _head("engine", "bare, at rest", "worker, at rest", "bare, peak", "worker, peak", "over", "allowed, MiB")
    for row in results.get("memory", {}).get("rows", ()):
        names = ("bare_rest", "worker_rest", "bare_peak", "worker_peak", "over", "allowed")
        lines.append(_row(row["engine"], *(f"{row[f'{name}_mib']:.0f}" for name in names)))
    return "\n".join(lines) + "\n"


def loads(results: Results) -> str:
    """Tokens per second and D's CPU for each, on this machine and on a GPU."""
    names = ("run", "clients", "case", "requests", "tokens/s", "of D's own server", "of D cached", "of the slower")
    lines = _head(*names, "of D's CPU", "CPU of D, ms/token")
    for run, row in _runs(results, "load", "rows"):
        told = (f"{row[share]:.2f}" if share in row else "" for share in ("of_own", "of_cached", "of_limit", "of_cpu"))
        cpu = f"{row['d_cpu_ms_per_token']:.1f}" if "d_cpu_ms_per_token" in row and "of_cached" in row else ""
        what = (row["clients"], row["case"], row["requests"], f"{row['tokens_per_s']:.1f}")
        lines.append(_row(run, *what, *told, cpu))
    return "\n".join(lines) + "\n"


def _runs(results: Results, bench: str, part: str) -> Iterator[tuple[str, Result]]:
    """Each row of a bench with the name of its file, those of a GPU after ours."""
    for name in sorted(results, key=lambda name: name.startswith("gpu-")):
        if name == bench or name.startswith(f"gpu-{bench}"):
            yield from ((name, _defaults(row) | row) for row in results[name].get(part, ()))


def _defaults(row: Result) -> Result:
    """What a row of a run on a GPU may lack: it has one model, and its second turns are on the loopback."""
    found = {"model": "", "link": "loopback", "samples": row.get("rounds", ""), "wire_ms": 0.0}
    if "target_ms" in row and "ttft_ms" in row:
        found["of_bound"] = row["ttft_ms"] / row["target_ms"]
    if "added_ms" in row:
        found["reached"] = row["added_ms"] <= turns.ADDED_MS
    return found


def edge(results: Results) -> str:
    """CPU of the process that speaks HTTP."""
    lines = _head("run", "server", "request, ms", "token, us", "streams", "tokens/s", "longest gap, ms", "usual gap")
    for name in ("api", "gpu-api"):
        for server, row in results.get(name, {}).get("rows", {}).items():
            cost = (f"{row['request_cpu_ms']:.2f}", f"{row['token_cpu_us']:.0f}")
            pace = (f"{row[what]:.0f}" for what in ("tokens_per_s", "gap_max_ms", "gap_median_ms"))
            lines.append(_row(name, server, *cost, row.get("streams", 200), *pace))
    return "\n".join(lines) + "\n"


def on_gpu(results: Results) -> str:
    """What handoffs add on a GPU, against the same target as `ttft`'s."""
    lines = _head("run", "route", "prompt", "P alone, ms", "handoff, ms", "added, ms", "target", "reached")
    for name, rows in gpu_runs(results):
        for row in rows:
            alone = row["prefill_alone_ms"]
            target = Target("", row["added_ms"], ttft.SHARE * alone + ttft.FIXED_MS, "ms")
            times = (f"{value:.1f}" for value in (alone, row["ttft_ms"], row["added_ms"]))
            bound, verdict = f"<= {target.bound:.1f}", _verdict(target.reached)
            lines.append(_row(name, row["route"], row["prompt_tokens"], *times, bound, verdict))
    return "\n".join(lines) + "\n"


def codecs(results: Results) -> str:
    """What each codec gives and costs."""
    lines = _head("codec", "ratio", "encode, MB/s", "decode, MB/s", "CPU s/GB")
    for row in results.get("codec", {}).get("rows", ()):
        rates = [
            f"{row[rate]:.0f}" if row["cpu_s_per_gb"] > 0.01 else "-" for rate in ("encode_mb_per_s", "decode_mb_per_s")
        ]
        lines.append(_row(f"`{row['codec']}`", f"{row['ratio']:.3f}", *rates, f"{row['cpu_s_per_gb']:.2f}"))
    return "\n".join(lines) + "\n"


def changed(results: Results) -> str:
    """What `int8` changes."""
    lines = _head("text", "KL mean / max, nats", "best token equal", "nll, and added", "greedy tokens equal")
    for row in results.get("codec", {}).get("int8", ()):
        divergence = f"{row['kl_mean']:.2g} / {row['kl_max']:.2g}"
        surprise = f"{row['nll']:.3f} {row['nll_added']:+.4f}"
        greedy = f"{row['greedy_equal']} of {row['greedy_tokens']}"
        lines.append(_row(row["text"], divergence, f"{100 * row['best_equal']:.1f} %", surprise, greedy))
    return "\n".join(lines) + "\n"


def gpu_runs(results: Results) -> Iterator[tuple[str, list[Result]]]:
    for name, result in results.items():
        if name.startswith("gpu-ttft-") and not name.endswith("-earlier") and result.get("rows"):
            yield name.removeprefix("gpu-ttft-"), sorted(result["rows"], key=lambda row: row["prompt_tokens"])


def _verdict(reached: bool) -> str:
    return "yes" if reached else "**no**"


def _head(*names: str) -> list[str]:
    return [_row(*names), _row(*("---" for _ in names))]


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


TABLES: dict[str, Callable[[Results], str]] = {
    "targets": targets,
    "ttft": first,
    "gpu": on_gpu,
    "codecs": codecs,
    "changed": changed,
    "links": crossed,
    "turns": second,
    "memory": memory,
    "load": loads,
    "edge": edge,
}
