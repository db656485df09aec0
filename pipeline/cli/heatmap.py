"""Heatmap: a deviation as a picture, layers by tokens, on a logarithmic scale. matplotlib is the extra `plot`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.deviation import Deviation
from pipeline.errors import ConfigError
from pipeline.page import PAGE_TOKENS

_FLOOR, _CEILING = 1e-4, 1.0  # relative RMS: below is exact for FP16, above nothing is left of the values


def write(found: Deviation, file: Path, title: str) -> None:
    """A PNG. Raises ConfigError without matplotlib, or where the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a heat map needs matplotlib: pip install 'crossfill[plot]'") from error
    figure = Figure(figsize=(max(6.0, min(14.0, 2.5 + 0.4 * found.pages)), 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = np.clip(found.map(), _FLOOR, _CEILING)
    extent = (0, found.pages * PAGE_TOKENS, found.layers - 0.5, -0.5)
    image = axes.imshow(
        values, aspect="auto", extent=extent, norm=LogNorm(_FLOOR, _CEILING), cmap="viridis", interpolation="nearest"
    )
    axes.set(title=title, xlabel="token of the prompt (a column is a page)", ylabel="layer")
    if found.first is not None:
        token, layer, *_ = found.first
        axes.plot(token, layer, "o", color="red", markersize=11, markerfacecolor="none", markeredgewidth=2)
        axes.annotate(
            f"first: token {token}, layer {layer}",
            (token, layer),
            xytext=(12, 12 if layer > found.layers // 2 else -16),
            textcoords="offset points",
            color="white",
            bbox={"boxstyle": "round", "facecolor": "black", "alpha": 0.7},
        )
    figure.colorbar(image, label="relative RMS (an honest pair of engines: about 2e-3)")
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {file}: {error}") from error
