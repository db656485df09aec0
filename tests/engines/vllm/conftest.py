"""What vLLM's own tests share: engines started one at a time, and two ways to stop one in the middle of its work.

An engine's steps are stopped through two seams: `engine._loop._engine.step` (one step of vLLM) and
`PageConnector.wait_for_save` (after a forward, before its pages are marked).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.engines.base import Engine
from pipeline.page import Page, PageShape
from pipeline.settings import EngineSettings
from tests.engines.conftest import Case, load_or_skip
from tests.engines.flow import PATIENCE_S, eventually, settles

SHAPE = PageShape(layers=4, kv_heads=2, head_dim=64)  # of tiny-qwen3
CHUNK = 128


def settings(pool_pages: int, **changes: Any) -> EngineSettings:
    return EngineSettings(
        **{"chunk_tokens": CHUNK, "kv_cache_bytes": pool_pages * SHAPE.page_bytes, "held_pages": 256, **changes}
    )


# vLLM allows one engine per process, and `case` is what the contract suite's session-wide engine hangs on: giving it
# another value closes that engine, and likewise ours when the tests go from one of these two to the other.
_OWN, _SHARED = Case("vllm", "own"), Case("vllm", "shared")
own_engine = pytest.mark.parametrize("case", [_OWN], indirect=True, ids=["own"])
shared_engine = pytest.mark.parametrize("case", [_SHARED], indirect=True, ids=["shared"])


@pytest.fixture
def start(case: Case, checkpoints: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Starts an engine on a tiny checkpoint and closes it after the test."""
    started: list[Engine] = []

    def make(chosen: EngineSettings, arch: str = "qwen3") -> Any:
        started.append(load_or_skip("vllm", checkpoints[arch], chosen))
        return started[-1]

    yield make
    for engine in started:
        engine.close()


@pytest.fixture(scope="session")
def shared(case: Case, checkpoints: dict[str, Path]) -> Iterator[Any]:
    engine = load_or_skip("vllm", checkpoints["qwen3"], settings(64, held_pages=8))
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Any) -> Iterator[Any]:
    """The shared engine with nothing cached; every block is free again after every test."""
    shared.reset_prefix_cache()
    baseline = shared.stats()
    yield shared
    assert settles(shared, baseline), f"{shared.stats()} is not {baseline}"


class Gate:
    """Lets an engine's steps pass one by one: the engine's thread waits before each."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits = threading.Semaphore(0)
        self._finished = threading.Semaphore(0)
        self._open = False
        self._inner = engine._loop._engine.step
        monkeypatch.setattr(engine._loop._engine, "step", self._step)

    def _step(self) -> Any:
        if not self._open:
            assert self._permits.acquire(timeout=PATIENCE_S)
        outputs = self._inner()
        self._finished.release()
        return outputs

    def let(self, steps: int = 1) -> None:
        """Run `steps` steps, each to its end."""
        for _ in range(steps):
            self._permits.release()
            assert self._finished.acquire(timeout=PATIENCE_S)

    def open(self) -> None:
        self._open = True
        self._permits.release()


class SaveGate:
    """Stops the engine after a forward, before the pages it computed are marked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from pipeline.engines.vllm.connector import PageConnector

        inner = PageConnector.wait_for_save
        self.reached, self.go_on = threading.Event(), threading.Event()

        def wait_for_save(connector: Any) -> None:
            if connector._get_connector_metadata().computing:  # not a step that only tidies up
                self.reached.set()
                assert self.go_on.wait(PATIENCE_S)
            inner(connector)

        monkeypatch.setattr(PageConnector, "wait_for_save", wait_for_save)


def arrived(engine: Any, count: int) -> bool:
    """Whether `count` requests wait for the gate inside vLLM: what one step will see is then known."""
    return eventually(lambda: len(engine._exchange.by_key) == count)


def relative_rms(page: Page, wanted: Page) -> float:
    ours, theirs = page.data.astype(np.float64), wanted.data.astype(np.float64)
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))


def scribble(engine: Any, value: float = 3.0) -> None:
    """Forget and overwrite every block: nothing of an earlier run can help."""
    engine.reset_prefix_cache()
    engine._exchange.copier.pages.fill(value)
