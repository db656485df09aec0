"""The vLLM engine: both roles on one in-process `LLMEngine`, pages through an out-of-tree KV connector.

This package alone imports vLLM and torch; where they are missing, importing it raises ImportError.
"""

from __future__ import annotations

from pipeline.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
