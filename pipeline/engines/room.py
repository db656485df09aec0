"""Room: does what an engine wants to hold fit the memory it runs in? The words for an operator when it does not."""

from __future__ import annotations

from pathlib import Path

_GIB = 1 << 30


def too_many(samples: int, needed_tokens: int, tokens: int) -> str:
    """Why so many `samples` of a request are refused of which one would fit; each has a prompt of its own here."""
    return (
        f"`n` = {samples} samples need KV memory for {needed_tokens} tokens and the engine has it for {tokens}: "
        "ask for fewer samples or a smaller `max_tokens`"
    )


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
