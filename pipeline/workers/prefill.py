"""The name of P's job as RQ and rq-dashboard show it. The worker maps the name to its own bound handler."""

from __future__ import annotations

from pipeline.errors import ConfigError


def run(handoff_id: str) -> dict[str, object]:
    """Only a Crossfill worker can run this; a stock `rq worker` must not. Raises ConfigError."""
    raise ConfigError(f"job for handoff {handoff_id} needs a Crossfill worker (`crossfill worker`), not `rq worker`")
