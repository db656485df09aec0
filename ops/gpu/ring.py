"""How long does the device work on moving 8000 tokens of KV between SGLang's pool and the page ring?

    python -m ops.gpu.ring RESULT.json

SGLang's pool lives in its scheduler process, out of reach of a clock. So the plug-in's own `Pool` and `Ring` run here,
over tensors laid out as SGLang lays out its own, in Qwen2.5-0.5B's dimensions. Device time is between two CUDA events
on the copy's stream around each run: gather or scatter over all layers, and the transfer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ops.gpu.checkpoint import HEAD_DIM, KV_HEADS, LAYERS
from ops.gpu.system import machine_line
from pipeline.engines.sglang.plugin.pool import Buffer, Pool
from pipeline.engines.sglang.ring import create, run_pages
from pipeline.page import PageShape

PAGES = 125
SAMPLES = 5
SHAPE = PageShape(LAYERS, KV_HEADS, HEAD_DIM)


class Clock:
    """Sums the device time of every copy."""

    def __init__(self, pool: Any) -> None:
        self.spans: list[tuple[Any, Any]] = []
        self._stream, self._inner = pool._stream, pool._on_stream
        pool._on_stream = self._timed

    def _timed(self, *arguments: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(self._stream)
        self._inner(*arguments)
        end.record(self._stream)
        self.spans.append((begin, end))

    def take_ms(self) -> float:
        spans, self.spans = self.spans, []
        for _, end in spans:
            end.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans))


def main() -> None:
    blocks = PAGES + 1
    memory = [
        torch.randn(blocks * 64, KV_HEADS, HEAD_DIM, device="cuda").to(torch.float16) for _ in range(2 * SHAPE.layers)
    ]
    size = memory[0].numel() * 2
    pool = Pool([Buffer(one.data_ptr(), size, size // blocks) for one in memory], SHAPE, 0)
    ring, fd = create(SHAPE)
    os.close(fd)
    pool.pin(ring.memory)
    clock, batch = Clock(pool), run_pages(SHAPE)
    result: dict[str, Any] = {"question": "device time of moving KV pages between SGLang's pool and the page ring"}
    result |= {"machine": machine_line(), "torch": torch.__version__, "pages": PAGES, "pages_at_once": batch}
    result |= {"megabytes": PAGES * SHAPE.page_bytes / 1e6, "pinned": torch.from_numpy(ring.runs[0]).is_pinned()}
    kept = np.empty((batch, *SHAPE.array), np.float16)
    for name, move in (("read", pool.read), ("write", pool.write)):
        device, wall = [], []
        for _ in range(SAMPLES + 1):
            start = time.perf_counter()
            for first in range(1, blocks, batch):
                ids = list(range(first, min(first + batch, blocks)))
                run = ring.runs[first % len(ring.runs)][: len(ids)]
                move(ids, run, pool.fence())
                if name == "read":
                    kept[: len(ids)] = run
            wall.append((time.perf_counter() - start) * 1e3)
            device.append(clock.take_ms())
        result |= {f"{name}_device_ms": statistics.median(device[1:]), f"{name}_wall_ms": statistics.median(wall[1:])}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
