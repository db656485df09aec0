"""Rope: rotary position embedding, half-split form, with the `linear` and `llama3` scalings.

Formulas: arXiv:2104.09864; `linear` is position interpolation (arXiv:2306.15595); `llama3` is the smooth
frequency interpolation published with Llama 3.1. Angles are computed in FP64, tables are FP32.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import ModelConfig, RopeScaling

Array = NDArray[np.float32]
Turn = tuple[Array, Array]


class Rope:
    """Cosines and sines of any run of positions."""

    def __init__(self, config: ModelConfig) -> None:
        exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        self._frequencies = scale(1.0 / config.rope_theta**exponents, config.rope_scaling)

    def turn(self, start: int, count: int) -> Turn:
        """Cosine and sine `(count, 1, head_dim / 2)` of positions `start .. start + count - 1`."""
        angles = np.arange(start, start + count, dtype=np.float64)[:, None, None] * self._frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    @staticmethod
    def apply(x: Array, turn: Turn) -> Array:
        """Rotate `(count, heads, head_dim)`: dimension i pairs with i + head_dim / 2."""
        cos, sin = turn
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def scale(frequencies: NDArray[np.float64], scaling: RopeScaling | None) -> NDArray[np.float64]:
    """Inverse frequencies after a config's `rope_scaling`."""
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # llama3: low frequencies are divided, high ones kept, those between blended by their turns per original context.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)
