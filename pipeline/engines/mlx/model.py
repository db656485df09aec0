"""Model: a checkpoint loaded by mlx-lm, in one compute dtype, checked against what handing KV over relies on.

Must be loaded, used and dropped on one thread: MLX arrays that are not evaluated yet belong to the thread that
made them, and some rotary tables stay lazy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten

from pipeline.contract import Contract
from pipeline.engines.mlx.lm import KVCache, load_model, make_prompt_cache
from pipeline.errors import UnsupportedModelError
from pipeline.page import PageShape

ComputeDtype = Literal["auto", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class Model:
    """`module(ids[batch, n], cache=...)` gives logits. KV is computed and kept in `dtype`, FP16 or FP32.

    `queues`: work can be queued behind running work without waiting. A CPU lets ten operations wait at most, so
    there the submitting thread would be held for most of what it submits.
    """

    module: Any
    dtype: Any
    shape: PageShape
    queues: bool

    @property
    def token_bytes(self) -> int:
        """What one token takes in a live cache."""
        return int(self.shape.layers * 2 * self.shape.kv_heads * self.shape.head_dim * self.dtype.size)


def load(directory: Path, contract: Contract, compute_dtype: ComputeDtype) -> Model:
    """Load the weights. Raises UnsupportedModelError where mlx-lm would not compute the KV that `contract` states."""
    module, _ = load_model(directory, lazy=True)
    _round_to_fp16(module)
    dtype = _choose(compute_dtype)
    module.set_dtype(dtype)
    mx.eval(module.parameters())
    require_plain(make_prompt_cache(module), contract.layers)
    return Model(module, dtype, contract.page_shape, queues=not _on_cpu())


def require_plain(caches: list[Any], layers: int) -> None:
    """Raise UnsupportedModelError unless there is one full-attention KVCache per layer, and not a relative of it.

    A rotating or quantised cache has no page of 64 plain tokens, and mlx-lm pairs layers and caches by `zip`:
    one cache too few and the last layer is left out without an error.
    """
    if len(caches) != layers:
        raise UnsupportedModelError("num_hidden_layers", layers, f"mlx-lm made {len(caches)} caches for it")
    for cache in caches:
        if type(cache) is not KVCache:
            raise UnsupportedModelError("cache", type(cache).__name__, "only full attention can be handed over")


def _choose(compute_dtype: ComputeDtype) -> Any:
    """FP16 is not vectorised on a CPU: there FP32 is about ten times faster and no less exact."""
    if compute_dtype == "auto":
        return mx.float32 if _on_cpu() else mx.float16
    return mx.float16 if compute_dtype == "float16" else mx.float32


def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def _round_to_fp16(module: Any) -> None:
    """A BF16 checkpoint is defined to mean its FP16 rounding, whatever an engine then computes in."""
    given = [name for name, value in tree_flatten(module.parameters()) if value.dtype != mx.float16]
    module.set_dtype(mx.float16)
    if not given:
        return
    rounded = dict(tree_flatten(module.parameters()))
    for name in given:
        if not mx.isfinite(rounded[name]).all().item():
            raise UnsupportedModelError(name, "overflow", "a weight is too large for FP16")
