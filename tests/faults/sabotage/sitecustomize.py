"""Sabotage: a worker that is started with this folder on its path loses its engine at SIGUSR1, and lives on.

The next step of the engine raises, as it does when a device is lost. Python imports this module by its name at start.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

STEPS = {
    "vllm.v1.engine.llm_engine": "LLMEngine",
    "pipeline.engines.mlx.core": "Core",
}


def _lose(_: Any) -> None:
    raise RuntimeError("the device is lost")


def _sabotage(_: int, __: FrameType | None) -> None:
    for module, name in STEPS.items():
        if module in sys.modules:
            getattr(sys.modules[module], name).step = _lose


signal.signal(signal.SIGUSR1, _sabotage)
