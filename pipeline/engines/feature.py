"""Feature: which of `request.FEATURES` each engine has, in one table that can be read without the engine.

The contract suite runs over an engine what this table says it has; `docs/engines.md` shows the table.
"""

from __future__ import annotations

from pipeline.request import FEATURES

_ALL = frozenset(FEATURES)

# SGLang's two roles are two kinds of worker.
SUPPORTED: dict[str, frozenset[str]] = {
    "reference": _ALL,
    "mlx": _ALL,
    "vllm": _ALL,
    "sglang prefill": _ALL,
    "sglang decode": _ALL,
}
