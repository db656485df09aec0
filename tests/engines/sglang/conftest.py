"""What SGLang's own tests share: engines started for one test module at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.base import Engine
from pipeline.settings import EngineSettings
from tests.engines.conftest import Case, load_or_skip, suite_settings

# `case` is what the contract suite's session-wide engine hangs on: another value closes that engine first.
own_engine = pytest.mark.parametrize("case", [Case("sglang", "own")], indirect=True, ids=["own"])


@pytest.fixture
def start(case: Case, checkpoints: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Starts an engine on a tiny checkpoint and closes it after the test."""
    started: list[Engine] = []

    def make(role: Any, **changes: Any) -> Any:
        settings: EngineSettings = suite_settings(checkpoints["qwen3"], role).model_copy(update=changes)
        started.append(load_or_skip("sglang", checkpoints["qwen3"], settings))
        return started[-1]

    yield make
    for engine in started:
        engine.close()
