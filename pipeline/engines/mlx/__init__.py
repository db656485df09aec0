"""The MLX engine: mlx-lm on Apple's Metal, on CUDA, or on a CPU."""

from pipeline.engines.mlx.engine import MlxEngine

__all__ = ["MlxEngine"]
