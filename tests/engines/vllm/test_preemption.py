"""Preemption takes blocks at once: pages of P become un-ready, a request on D recomputes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.reference.model import Model
from pipeline.errors import EngineError
from pipeline.request import Sampling
from tests.engines.flow import (
    PATIENCE_S,
    Oracle,
    Waiter,
    compute_locally,
    deliver,
    eventually,
    export,
    prompt,
    request,
    settles,
)
from tests.engines.vllm.conftest import (
    SHAPE,
    Gate,
    arrived,
    own_engine,
    relative_rms,
    scribble,
    settings,
    shared_engine,
)


@own_engine
def test_a_preempted_prompt_offers_its_pages_again(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(settings(7, chunk_tokens=64, max_running=4))
    baseline = engine.stats()
    victim = request(prompt(256, seed=1))
    expected = export(engine, victim)
    scribble(engine)

    gate = Gate(engine, monkeypatch)
    grower = request(prompt(189), Sampling(max_tokens=60, temperature=0.0))
    growing = Waiter(partial(compute_locally, engine, grower))
    assert arrived(engine, 1)
    gate.let(3)  # the grower's prompt: 3 of the 7 blocks, and the 4th before the victim has all of its 4
    running = engine.prefill(victim)
    while not running.wait_ready(1, 0):
        gate.let()
    read = [running.read(0)]
    while running.wait_ready(1, 0):
        assert not running.done, "nobody was preempted"
        gate.let()
    gate.open()
    growing.join()
    assert growing.error is None
    assert eventually(lambda: running.done)
    read += [running.read(index) for index in (1, 2, 3)]  # late: vLLM has finished the prompt long before
    assert [page.tokens for page in read] == [64, 64, 64, 63]
    assert all(relative_rms(page, wanted) < 5e-3 for page, wanted in zip(read, expected, strict=True))
    running.close()
    assert settles(engine, baseline)


@shared_engine
def test_a_preemption_waits_for_a_running_copy_and_for_nothing_else(engine: Any) -> None:
    from pipeline.engines.vllm.copier import Fence
    from pipeline.engines.vllm.exchange import Exchange
    from pipeline.engines.vllm.export import Export

    class SlowCopier:
        batch = 1

        def __init__(self) -> None:
            self.began, self.go_on = threading.Event(), threading.Event()

        def read(self, blocks: list[int], after: Fence) -> list[Any]:
            self.began.set()
            assert self.go_on.wait(PATIENCE_S)
            events.append("copied")
            return [SHAPE.empty() for _ in blocks]

    events: list[str] = []
    exchange, pages = Exchange(), SlowCopier()
    exchange.copier = pages  # type: ignore[assignment]
    exporting = Export("p", request(prompt(200)), exchange)
    exporting.publish(2, [5, 6], Fence())
    reader = Waiter(lambda: exporting.read(0))
    assert pages.began.wait(PATIENCE_S)

    def withdraw() -> None:
        exporting.withdraw()
        events.append("withdrawn")

    withdrawing = Waiter(withdraw)
    assert eventually(lambda: exporting._ready == 0)
    assert not exporting.wait_ready(1, 0)
    assert events == []
    pages.go_on.set()
    reader.join()
    withdrawing.join()
    assert events == ["copied", "withdrawn"]
    exporting.withdraw()  # nobody reads: returns at once
    exporting.publish(3, [9, 8, 7], Fence())
    assert exporting.wait_ready(1, 0)
    with pytest.raises(EngineError, match="read or skipped"):
        exporting.read(0)


@own_engine
def test_an_imported_request_survives_preemption(
    start: Callable[..., Any], checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(settings(16))
    baseline = engine.stats()
    oracle = Oracle(Model.load(checkpoints["qwen3"]))
    ids = oracle.sure_prompt(200, 12)
    order = request(ids, Sampling(max_tokens=12, temperature=0.0))
    pages = export(engine, order)
    scribble(engine)
    sampled = engine.stats().tokens_sampled
    gate = Gate(engine, monkeypatch)
    arriving = Waiter(partial(deliver, engine, order, pages))
    while engine.stats().tokens_sampled < sampled + 5:
        gate.let()
    scheduler = engine._loop._scheduler
    computed = engine.stats().prompt_tokens_computed
    monkeypatch.setattr(scheduler, "schedule", _preempting(scheduler))
    gate.open()
    arriving.join()
    assert arriving.error is None
    assert arriving.value == (list(oracle.text(ids, 12).tokens), 0, "length")
    assert engine.stats().prompt_tokens_computed > computed, "it was not preempted: nothing was recomputed"
    assert settles(engine, baseline)


def _preempting(scheduler: Any) -> Callable[..., Any]:
    """`schedule` that preempts everything that runs, once."""
    inner = scheduler.schedule

    def schedule(*args: Any) -> Any:
        if scheduler.running:
            scheduler.reset_prefix_cache(reset_running_requests=True)
            scheduler.schedule = inner
        return inner(*args)

    return schedule
