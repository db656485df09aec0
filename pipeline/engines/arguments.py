"""Arguments: an operator's own arguments of an engine, beside those that Crossfill sets."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from pipeline.errors import ConfigError


def checked(engine: str, more: Mapping[str, Any], known: Container[str], ours: Container[str]) -> Mapping[str, Any]:
    """`more` as it is. Raises ConfigError for an argument that this `engine` lacks or that is ours to set."""
    for name in more:
        if name not in known:
            raise ConfigError(f"engine_settings.arguments: this {engine} has no argument {name!r}")
        if name in ours:
            raise ConfigError(f"engine_settings.arguments: {name!r} is set by Crossfill, page transfer relies on it")
    return more
