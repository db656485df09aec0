"""The reference engine: a small pure-numpy Qwen2/Qwen3/Llama, exact and slow; the dumb twin of all others."""

from pipeline.engines.reference.engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
