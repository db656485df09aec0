"""How long does the device work on moving 8000 tokens of KV out of vLLM's blocks and into them again?

    python -m ops.gpu.copies MODEL RESULT.json [--tokens 8001]

In process, on CUDA. Device time is between two CUDA events on the copy's own stream, around every batch, so it holds
the gather or scatter over all layers, the transfer, and the gaps while the host launches them. Then the whole path as
jobs see it: prefill alone, prefill with every page read as it becomes ready, import, and the text after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import engines
from pipeline.page import Page, page_count
from pipeline.request import Request, Sampling
from pipeline.settings import EngineSettings

SAMPLES = 5
CHUNK = 1024


class Clock:
    """Sums the device time of every copy by wrapping the copier's stream sections."""

    def __init__(self, copier: Any) -> None:
        self.spans: list[tuple[Any, Any]] = []
        self._inner = copier._copying
        copier._copying = self._copying

    @contextmanager
    def _copying(self, stream: Any, after: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._inner(stream, after):
            begin.record(stream)
            yield
            end.record(stream)
        self.spans.append((begin, end))

    def take_ms(self) -> float:
        """Device time since the last call; every copy counted has ended."""
        spans, self.spans = self.spans, []
        for _, end in spans:
            end.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans))


def order(ids: tuple[int, ...], label: str) -> Request:
    return Request(f"{label}-{time.monotonic_ns()}", ids, Sampling(max_tokens=16, temperature=0.0))


def prefill(engine: Any, ids: tuple[int, ...], *, read: bool) -> tuple[dict[str, float], list[Page]]:
    """Times in ms: first page readable, first page read, prompt computed, last page read."""
    engine.reset_prefix_cache()
    request = order(ids, "p")
    pages: list[Page] = []
    at: dict[str, float] = {}
    start = time.perf_counter()

    def note(name: str) -> None:
        at.setdefault(name, (time.perf_counter() - start) * 1e3)

    with closing(engine.prefill(request)) as work:
        for index in range(page_count(request.transfer_tokens) if read else 0):
            assert work.wait_ready(index, 60)
            pages.append(work.read(index))
            note("first_page_ms")
            if work.done:
                note("computed_ms")
        assert work.wait_done(60)
        note("computed_ms")
        note("all_read_ms")
    return at, pages


def take(engine: Any, ids: tuple[int, ...], pages: list[Page]) -> tuple[dict[str, float], list[int]]:
    engine.reset_prefix_cache()
    engine._exchange.copier.pages.fill(float("nan"))
    torch.cuda.synchronize()
    start = time.perf_counter()
    with closing(engine.admit(order(ids, "d"))) as admission:
        assert admission.held_pages == 0
        admitted = time.perf_counter()
        for page in pages:
            admission.import_page(page)
        imported = time.perf_counter()
        text, first = [], 0.0
        for step in admission.decode():
            first = first or time.perf_counter()
            text += step.token_ids
    marks = {"admit_ms": admitted - start, "import_ms": imported - admitted, "first_token_ms": first - imported}
    return {name: value * 1e3 for name, value in marks.items()}, text


def local(engine: Any, ids: tuple[int, ...], *, warm: bool) -> list[int]:
    if not warm:
        engine.reset_prefix_cache()
    with closing(engine.admit(order(ids, "l"), local=True)) as admission:
        return [token for step in admission.decode() for token in step.token_ids]


def median(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(s[name] for s in samples), 3) for name in samples[0]}


def measure(engine: Any, tokens: int) -> dict[str, Any]:
    ids = tuple(int(i) for i in np.random.default_rng(tokens).integers(1000, 150_000, tokens))
    copier = engine._exchange.copier
    clock = Clock(copier)
    expected = local(engine, ids, warm=False)
    again = local(engine, ids, warm=True)  # all whole pages hit: the split a handoff has, but for the tail
    rounds: dict[str, list[dict[str, float]]] = {"alone": [], "export": [], "import": []}
    texts: list[list[int]] = []
    pages: list[Page] = []
    for _ in range(SAMPLES + 1):
        rounds["alone"].append(prefill(engine, ids, read=False)[0])
        clock.take_ms()
        times, pages = prefill(engine, ids, read=True)
        rounds["export"].append(times | {"device_ms": clock.take_ms()})
        times, text = take(engine, ids, pages)
        rounds["import"].append(times | {"device_ms": clock.take_ms()})
        texts.append(text)
    copier._copying = clock._inner
    return {
        "tokens": tokens,
        "pages": len(pages),
        "megabytes": round(sum(page.data.nbytes for page in pages) / 1e6, 1),
        "text_equals_local": sum(text == expected for text in texts),
        "text_equals_prefix_hit": sum(text == again for text in texts),
        "texts": len(texts),
        "leading_equal_to_local": [_leading(text, expected) for text in texts],
        "bulk": bulk(engine, pages),
        **{name: median(samples[1:]) for name, samples in rounds.items()},
    }


def bulk(engine: Any, pages: list[Page]) -> dict[str, float]:
    """The same pages moved at once with nothing else on the device, batch by batch, beside the parts of a batch."""
    copier = engine._exchange.copier
    from pipeline.engines.vllm.copier import Fence

    clock, blocks = Clock(copier), list(range(1, len(pages) + 1))
    host = copier.host(len(pages))
    np.stack([page.data for page in pages], out=host.numpy())
    result: dict[str, float] = {}
    steps: dict[str, Callable[[int], Any]] = {
        "write": lambda i: copier.write(blocks[i : i + 16], host[i : i + 16], Fence()),
        "read": lambda i: copier.read(blocks[i : i + 16], Fence()),
    }
    for name, move in steps.items():
        device, wall = [], []
        for _ in range(SAMPLES + 1):
            start = time.perf_counter()
            for i in range(0, len(pages), 16):
                move(i)
            wall.append((time.perf_counter() - start) * 1e3)
            device.append(clock.take_ms())
        result |= {f"{name}_device_ms": statistics.median(device[1:]), f"{name}_wall_ms": statistics.median(wall[1:])}
    copier._copying = clock._inner
    assert all(np.array_equal(got, page.data) for got, page in zip(copier.read(blocks, Fence()), pages, strict=True))
    return {name: round(value, 3) for name, value in result.items()}


def _leading(ours: list[int], theirs: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--tokens", default="51,744,2844,8001")
    options = parser.parse_args()
    settings = EngineSettings(chunk_tokens=CHUNK, kv_cache_bytes=4 << 30, held_pages=4096)
    with closing(engines.load("vllm", options.model, settings)) as engine:
        rows = [measure(engine, int(tokens)) for tokens in options.tokens.split(",")]
    import vllm

    result = {
        "question": "device time of moving KV pages out of and into vLLM's blocks",
        "gpu": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "model": "random FP16 weights, Qwen2.5-0.5B dimensions",
        "chunk_tokens": CHUNK,
        "batch_pages": 16,
        "samples": SAMPLES,
        "rows": rows,
    }
    options.result.write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
