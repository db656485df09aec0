"""Room: does what an engine wants to hold fit the memory it runs in? The words for an operator when it does not."""

from __future__ import annotations

from pathlib import Path

_GIB = 1 << 30


def shortage(checkpoint: Path, kv_cache_bytes: int, free_bytes: int) -> str | None:
    """What is missing and what to change, or None where weights and KV fit into `free_bytes`.

    Weights count as their files do; what an engine needs beside them is not known, so None promises nothing.
    """
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    if weights + kv_cache_bytes <= free_bytes:
        return None
    sizes = [f"{size / _GIB:.1f} GiB" for size in (weights, kv_cache_bytes, free_bytes)]
    return "out of memory: {} of weights and kv_cache_bytes of {} do not fit the {} that are free".format(*sizes) + (
        ": lower kv_cache_bytes or free memory" if weights < free_bytes else ": this model needs a larger device"
    )
