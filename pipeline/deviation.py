"""Deviation: how far the KV of one prompt, computed twice, lies apart: per layer, per page, and where it begins.

Two honest engines differ by rounding, about 2e-3 relative RMS. A fault differs by orders of magnitude, and the first
token and layer where it does say what to look at: all later tokens and layers follow from them. Knows pages only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.page import PAGE_TOKENS, Page

TOLERANCE = 0.05  # relative RMS of one token in one layer; engines in FP16 and FP32 stay below half of it
_PLANES = ("K", "V")
_SUMS = 4  # squared difference, squares of theirs, squares of ours, products
Array = NDArray[np.float64]


class Measure(NamedTuple):
    """`relative_rms` is RMS(ours - theirs) / RMS(theirs); `cosine` that of both as vectors (1 for two zeros)."""

    max_abs: float
    relative_rms: float
    cosine: float


class Place(NamedTuple):
    """The first token, and in it the first layer and plane, beyond the tolerance."""

    token: int
    layer: int
    plane: str
    relative_rms: float


class Deviation:
    """Add page by page, in order; then ask. `ours` is compared with `theirs`, the rows that both have."""

    def __init__(self, layers: int, tolerance: float = TOLERANCE) -> None:
        self.tolerance = tolerance
        self.first: Place | None = None
        self.tokens = 0
        self.layers = layers
        self._sums: list[Array] = []  # per page (layers, 2, _SUMS)
        self._peaks: list[Array] = []  # per page (layers, 2): largest difference

    @property
    def pages(self) -> int:
        return len(self._sums)

    def add(self, ours: Page, theirs: Page) -> None:
        tokens = min(ours.tokens, theirs.tokens)
        a, b = (page.data[:, :, :, :tokens].astype(np.float64) for page in (ours, theirs))
        difference = a - b
        rows = np.stack([difference**2, b**2, a**2, a * b], axis=-1).sum(axis=(2, 4))  # (layers, 2, tokens, _SUMS)
        if self.first is None:
            self.first = self._find(rows, self.tokens)
        self._sums.append(rows.sum(axis=2))
        self._peaks.append(np.abs(difference).max(axis=(2, 3, 4)))
        self.tokens += tokens

    def layer(self, index: int) -> Measure:
        return self._measure(slice(None), slice(index, index + 1))

    def page(self, index: int) -> Measure:
        return self._measure(slice(index, index + 1), slice(None))

    def total(self) -> Measure:
        return self._measure(slice(None), slice(None))

    def span(self, index: int) -> range:
        """The tokens of a page."""
        return range(index * PAGE_TOKENS, min((index + 1) * PAGE_TOKENS, self.tokens))

    def map(self) -> Array:
        """Relative RMS, `(layers, pages)`."""
        sums = np.stack(self._sums, axis=1).sum(axis=2)  # K and V together
        relative: Array = _relative(sums[..., 0], sums[..., 1])
        return relative

    def _find(self, rows: Array, before: int) -> Place | None:
        """A token is measured against the page's own scale: one small key must not look like a fault."""
        scale = rows[..., 1].mean(axis=2, keepdims=True)
        relative = _relative(rows[..., 0], np.broadcast_to(scale, rows.shape[:3]))
        beyond = np.argwhere(relative.transpose(2, 0, 1) > self.tolerance)  # in order of token, layer, plane
        if not len(beyond):
            return None
        token, layer, plane = (int(at) for at in beyond[0])
        return Place(before + token, layer, _PLANES[plane], float(relative[layer, plane, token]))

    def _measure(self, pages: slice, layers: slice) -> Measure:
        if not self._sums:
            return Measure(0.0, 0.0, 1.0)
        difference, theirs, ours, product = np.stack(self._sums[pages])[:, layers].sum(axis=(0, 1, 2))
        peak = float(np.stack(self._peaks[pages])[:, layers].max())
        length = float(np.sqrt(theirs * ours))
        cosine = float(product) / length if length else float(theirs == ours)
        return Measure(peak, float(_relative(difference, theirs)), cosine)


def _relative(difference: Array, theirs: Array) -> Array:
    """sqrt(difference / theirs); 0 for two zeros, infinite where only one is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.sqrt(np.where(difference == 0, 0.0, np.divide(difference, theirs)))
    return found
