"""Limit: what stands in the way of a target that was missed, as far as it is known.

Told beside the number in `docs/performance.md`; a bench that reaches its targets needs no row here.
"""

from __future__ import annotations

CPU = "two cores for P, D, broker, API and client"
_LIMITS = {
    ("api", "a request"): "many small parts, a third the framework's; 1.6 ms on idle cores (gpu-api)",
    ("api", "does nothing"): "this machine: one send, one wake and one pass of the event loop",
    ("api", "a streamed token"): "wakes: less than half of it on idle cores (gpu-api)",
    ("gpu-api", "a streamed token"): "the floor's 20 us, then message, text and chunk",
    ("gpu-links-vllm-mlx", "prompt new"): "744 tokens from vLLM to MLX alone: the median of two prompts",
    ("gpu-load-mlx-vllm", ""): "P and D take turns on one GPU: their times added up leave 0.63",
    ("gpu-stream", ""): "the busiest of three processes on a core each; a server of one thread can give 0.5",
    ("links", "light: "): f"{CPU}, of which a handoff takes some beside the wire",
    ("links", "prompt new"): f"{CPU}: sending takes them from computing",
    ("links", "prompt held"): f"{CPU}; D computes the last token when the last page is in",
    ("load", "P computes, of D's own"): "P: its prompts alone take longer than D's tokens",
    ("load", "of D's own"): "threads of D's jobs share core and interpreter with an engine that takes little itself",
    ("load", "per CPU second"): "what D does for imports and for each token",
    ("load", ""): CPU,
    ("stream", "plain TCP"): f"{CPU}: a copy by each of three processes, a digest by two",
    ("stream", "xoscar"): "as above; xoscar has no third process between its two",
    ("ttft", "light, "): f"{CPU}: each step of a handoff waits for one of them",
    ("ttft", ""): "the scatter of CPU prefill on shared cores; on a GPU see the table below",
    ("turns", "light, "): f"{CPU}: each step of a handoff waits for one of them",
    ("turns", ""): "the scatter of a prefill of a second on shared cores is several times the 25 ms",
}


def of(bench: str, what: str) -> str:
    """For a target's row; empty where nothing is known."""
    return next((why for (name, part), why in _LIMITS.items() if name == bench and part in what), "")
