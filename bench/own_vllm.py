"""vLLM's own server without its routes for SageMaker, whose package our environment does not have. Runs beside vLLM.

It ends when the bench does that started it, however that one ends.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import ModuleType
from typing import Any

from pipeline.cli import lifeline


def _no_routes(*_: Any) -> None:
    """Nobody asks for them here."""


def _same(app: Any) -> Any:
    return app


if __name__ == "__main__":
    lifeline.hold(os.getppid())
    absent: Any = ModuleType("vllm.entrypoints.serve.sagemaker.api_router")
    absent.attach_router, absent.sagemaker_standards_bootstrap = _no_routes, _same
    sys.modules[absent.__name__] = absent
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
