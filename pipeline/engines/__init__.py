"""Engines by name. One row per engine; nothing is imported until it is asked for.

An engine class is constructed as `Engine(checkpoint, settings)`: a directory path and `EngineSettings`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from pipeline.engines.base import Engine
from pipeline.errors import ConfigError
from pipeline.settings import EngineSettings

ENGINES = {
    "reference": "pipeline.engines.reference:ReferenceEngine",
    "mlx": "pipeline.engines.mlx:MlxEngine",
    "vllm": "pipeline.engines.vllm:VllmEngine",
    "sglang": "pipeline.engines.sglang.engine:SglangEngine",
}
WITH_ARGUMENTS = ("sglang", "vllm")


def load(name: str, checkpoint: Path, settings: EngineSettings) -> Engine:
    """Import the engine's module and load the model. Raises ConfigError for an unknown or absent engine."""
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: choose one of {', '.join(sorted(ENGINES))}")
    if settings.arguments and name not in WITH_ARGUMENTS:
        raise ConfigError(f"engine_settings.arguments: {name} takes none, only {' and '.join(WITH_ARGUMENTS)} do")
    module, _, cls = ENGINES[name].partition(":")
    try:
        factory = getattr(import_module(module), cls)
    except ImportError as error:
        raise ConfigError(f"engine {name!r} is not installed in this environment: {error}") from error
    return cast(Engine, factory(checkpoint, settings))
