"""vLLM's own: preemption and late reads, what is held and when it is freed, the seeded draw, the block layout, death.

The engine's steps are observed and stopped through two seams: `engine._loop._engine.step` (one step of vLLM) and
`PageConnector.wait_for_save` (after a forward, before its pages are marked).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.engines import load
from pipeline.engines.base import Engine
from pipeline.engines.reference.model import Model
from pipeline.errors import ConfigError, EngineError, HandoffCancelledError
from pipeline.page import PAGE_TOKENS, Page, PageShape
from pipeline.request import Sampling
from pipeline.settings import EngineSettings
from tests.engines.conftest import ARCHITECTURES, Case, load_or_skip
from tests.engines.flow import (
    GREEDY,
    PATIENCE_S,
    Oracle,
    Waiter,
    at_rest,
    compute_locally,
    deliver,
    eventually,
    export,
    import_missing,
    prompt,
    read_text,
    request,
    settles,
)

ORACLE = Path(__file__).parents[1] / "oracles" / "vllm_split.py"
SHAPE = PageShape(layers=4, kv_heads=2, head_dim=64)  # of tiny-qwen3
SPLIT_LENGTHS = (1, 2, 51, 63, 64, 65, 66, 127, 129, 193, 321)
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


def arrived(engine: Any, count: int) -> bool:
    """Whether `count` requests wait for the gate inside vLLM: what one step will see is then known."""
    return eventually(lambda: len(engine._exchange.by_key) == count)


def relative_rms(page: Page, wanted: Page) -> float:
    ours, theirs = page.data.astype(np.float64), wanted.data.astype(np.float64)
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))


def scribble(engine: Any) -> None:
    """Fill every block with NaN: nothing of an earlier run can help, and a row read too many ruins the text."""
    import torch

    engine.reset_prefix_cache()
    with torch.inference_mode():
        for keys, values in engine._exchange.pages._layers:
            keys.fill_(float("nan"))
            values.fill_(float("nan"))


# Equality with plain vLLM


@own_engine
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_text_is_exactly_that_of_plain_vllm_at_the_same_split(
    start: Callable[..., Any], checkpoints: dict[str, Path], arch: str
) -> None:
    engine = start(settings(64), arch)
    prompts = [prompt(tokens, seed=tokens) for tokens in SPLIT_LENGTHS]
    expected = split_oracle(checkpoints[arch], prompts)
    for ids, tokens in zip(prompts, expected, strict=True):
        pages = export(engine, request(ids))
        scribble(engine)
        before = engine.stats().prompt_tokens_computed
        text, held, finish = deliver(engine, request(ids), pages)
        assert (text, held, finish) == (tokens, 0, "length"), f"at {len(ids)} tokens"
        assert engine.stats().prompt_tokens_computed - before == 1


def split_oracle(directory: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    task = {"model": str(directory), "prompts": prompts, "max_tokens": GREEDY.max_tokens, "chunk_tokens": CHUNK}
    done = subprocess.run(
        [sys.executable, ORACLE],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [output["tokens"] for output in json.loads(done.stdout.splitlines()[-1])["outputs"]]


# Preemption


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
    from pipeline.engines.vllm.exchange import Exchange
    from pipeline.engines.vllm.export import Export

    class SlowPages:
        def __init__(self) -> None:
            self.began, self.go_on = threading.Event(), threading.Event()

        def read(self, block: int, tokens: int) -> Any:
            self.began.set()
            assert self.go_on.wait(PATIENCE_S)
            events.append("copied")
            return SHAPE.empty()

    events: list[str] = []
    exchange, pages = Exchange(), SlowPages()
    exchange.pages = pages  # type: ignore[assignment]
    exporting = Export("p", request(prompt(200)), exchange)
    exporting.publish(2, [5, 6])
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
    exporting.publish(3, [9, 8, 7])
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


# Holding and freeing


@shared_engine
def test_blocks_are_held_until_the_last_page_is_read(engine: Any) -> None:
    free = engine.stats().free_pages
    running = engine.prefill(request(prompt(300)))
    assert running.wait_ready(4, PATIENCE_S)
    assert eventually(lambda: running.done)
    for index in (4, 0, 2, 1):
        running.read(index)
        assert engine.stats().free_pages == free - 5
    assert engine.stats().held_pages == 1  # the only one still to be read
    running.read(3)
    assert eventually(lambda: engine.stats().free_pages == free)
    assert engine.stats().running == 0
    running.close()


@shared_engine
def test_an_import_that_was_closed_is_never_found_again(engine: Any) -> None:
    order = request(prompt(200))
    pages = export(engine, order)
    engine.reset_prefix_cache()
    baseline = engine.stats()
    for imported in (1, 3, 4):
        admission = engine.admit(order)
        import_missing(admission, pages[:imported])
        assert engine.stats().free_pages < baseline.free_pages
        admission.close()
        assert at_rest(engine.stats()) == at_rest(baseline)  # at once, not soon
        assert engine.stats().cached_pages == 0
        with pytest.raises(HandoffCancelledError):
            admission.decode()


@shared_engine
def test_the_last_page_must_be_there_before_decode(engine: Any) -> None:
    order = request(prompt(200))
    pages = export(engine, order)
    engine.reset_prefix_cache()
    admission = engine.admit(order)
    import_missing(admission, pages[:3])
    with pytest.raises(EngineError, match="page 3 of 4"):
        admission.decode()
    with pytest.raises(EngineError, match="expected 7"):
        admission.import_page(Page(3, 8, pages[3].data))
    admission.import_page(pages[3])
    with pytest.raises(EngineError, match="4 of 4"):
        admission.import_page(pages[3])
    assert len(read_text(admission.decode())[0]) == 8
    admission.close()


@shared_engine
def test_both_roles_at_once(engine: Any, checkpoints: dict[str, Path]) -> None:
    oracle = Oracle(Model.load(checkpoints["qwen3"]))  # sure tokens: batches differ, and with them the FP16 noise
    prompts = [oracle.sure_prompt(tokens) for tokens in (40, 65, 100, 128, 130, 190, 200, 256)]
    alone = [hand_over(engine, ids) for ids in prompts]
    engine.reset_prefix_cache()
    flows = [Waiter(partial(hand_over, engine, ids)) for ids in prompts]
    for flow, expected in zip(flows, alone, strict=True):
        flow.join()
        assert flow.error is None
        assert flow.value == expected


def hand_over(engine: Any, ids: tuple[int, ...]) -> list[int]:
    """To itself; P under another salt, so that D does not find P's blocks."""
    return deliver(engine, request(ids), export(engine, request(ids, salt="p")))[0]


@shared_engine
def test_a_reset_forgets_though_a_request_is_live(engine: Any) -> None:
    ids = prompt(200)
    compute_locally(engine, request(ids))
    live = engine.prefill(request(prompt(100, seed=1)))
    assert live.wait_ready(1, PATIENCE_S)
    engine.reset_prefix_cache()
    admission = engine.admit(request(ids))
    assert admission.held_pages == 0
    admission.close()
    assert live.read(0).tokens == PAGE_TOKENS
    live.close()


# Pages of P's own prefix cache


class SaveGate:
    """Stops the engine after a forward, before the pages it computed are marked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from pipeline.engines.vllm.connector import PageConnector

        inner = PageConnector.wait_for_save
        self.reached, self.go_on = threading.Event(), threading.Event()

        def wait_for_save(connector: Any) -> None:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
            inner(connector)

        monkeypatch.setattr(PageConnector, "wait_for_save", wait_for_save)


@shared_engine
def test_cached_pages_can_be_read_before_the_forward(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order = request(prompt(200))
    first = export(engine, order)
    gate = SaveGate(monkeypatch)
    running = engine.prefill(order)
    assert gate.reached.wait(PATIENCE_S)
    assert [running.wait_ready(index, 0) for index in range(4)] == [True, True, True, False]
    assert np.array_equal(running.read(1).data, first[1].data)
    gate.go_on.set()
    running.close()


@shared_engine
def test_a_hit_on_a_page_of_the_same_step_waits_for_it(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Gate(engine, monkeypatch)
    first = engine.prefill(request(prompt(2)))  # holds the engine before a step until both twins have come
    assert arrived(engine, 1)
    twins = [engine.prefill(request(prompt(65, seed=5))) for _ in range(2)]
    steps.let()
    assert arrived(engine, 3)
    saves = SaveGate(monkeypatch)
    steps.open()
    assert saves.reached.wait(PATIENCE_S)
    assert [twin.wait_ready(0, 0) for twin in twins] == [False, False], "the forward has not been waited for"
    saves.go_on.set()
    one, other = (twin.read(0) for twin in twins)
    assert np.array_equal(one.data, other.data)
    for running in (*twins, first):
        running.close()


# Sampling


@shared_engine
def test_a_seeded_text_does_not_depend_on_chunks_or_on_where_the_prompt_came_from(engine: Any) -> None:
    order = request(prompt(300, seed=3), Sampling(max_tokens=12, temperature=0.7, top_p=0.9, top_k=40, seed=11))
    local = compute_locally(engine, order)  # three chunks: vLLM's own seed dies of that on a CPU
    engine.reset_prefix_cache()
    pages = export(engine, order)
    engine.reset_prefix_cache()
    assert deliver(engine, order, pages)[0] == local


@shared_engine
def test_a_seeded_text_goes_on_where_it_was_cut(engine: Any) -> None:
    whole = Sampling(max_tokens=12, temperature=1.0, seed=11)
    ids = prompt(90, seed=3)
    text = compute_locally(engine, request(ids, whole))
    rest = compute_locally(engine, request((*ids, *text[:5]), Sampling(max_tokens=7, temperature=1.0, seed=11)))
    assert rest == text[5:]


@shared_engine
def test_the_draw_follows_the_distribution(engine: Any) -> None:
    import torch

    from pipeline.engines.vllm.sampling import draw

    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])
    count = 4000
    frequencies = np.zeros(5)
    for position in range(count):
        token = int(draw(logits, position=position, seed=-5, temperature=2.0, top_k=4, top_p=0.8).argmax())
        frequencies[token] += 1 / count
    kept = np.exp(np.array([2.0, 1.0, 0.0, 3.0]) / 2)  # top-k drops token 3
    kept /= kept.sum()
    kept[2] = 0  # top-p: 0.46 + 0.28 + 0.17 reach 0.8 without token 2
    expected = np.zeros(5)
    expected[[0, 1, 2, 4]] = kept / kept.sum()
    assert np.abs(frequencies - expected).max() < 0.03
    assert frequencies[2] == frequencies[3] == 0


# Refusals


@shared_engine
def test_the_block_layout_is_verified(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.engines.vllm import blocks

    for shape in (SHAPE, PageShape(2, 2, 32), PageShape(30, 3, 64), PageShape(1, 2, 128)):
        blocks.verify_layout(shape)
    monkeypatch.setattr(blocks, "split_cpu", blocks.split_cuda)
    with pytest.raises(ConfigError, match="lays out KV blocks"):
        blocks.verify_layout(SHAPE)


@shared_engine
def test_cuda_views_are_right_for_both_stride_orders(engine: Any) -> None:
    import torch

    from pipeline.engines.vllm.blocks import split_cuda

    canonical = torch.randn(3, 2, 2, PAGE_TOKENS, 8).half()  # (blocks, K|V, heads, tokens, dim)
    logical = torch.cat([canonical[:, 0], canonical[:, 1]], dim=-1)
    in_memory = {"HND": logical.contiguous(), "NHD": logical.transpose(1, 2).contiguous().transpose(1, 2)}
    assert in_memory["HND"].stride() != in_memory["NHD"].stride()
    for layer in in_memory.values():
        keys, values = split_cuda(layer)
        assert torch.equal(keys, canonical[:, 0])
        assert torch.equal(values, canonical[:, 1])


@shared_engine
def test_tensors_of_another_shape_are_refused(engine: Any) -> None:
    import torch

    from pipeline.engines.vllm.blocks import BlockPages

    right = torch.zeros(2, 2, PAGE_TOKENS, 128, dtype=torch.float16)
    BlockPages([right] * 4, SHAPE)
    with pytest.raises(ConfigError, match="3 layers"):
        BlockPages([right] * 3, SHAPE)
    with pytest.raises(ConfigError, match="bfloat16"):
        BlockPages([right.bfloat16()] * 4, SHAPE)
    with pytest.raises(ConfigError, match="KV blocks are"):
        BlockPages([right[:, :, :32]] * 4, SHAPE)


@shared_engine
def test_a_second_engine_in_the_process_is_refused(engine: Any, checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="one engine per process"):
        load_or_skip("vllm", checkpoints["qwen3"], settings(8))
    assert len(compute_locally(engine, request(prompt(20)))) == 8


@shared_engine
def test_requests_that_vllm_would_choke_on_are_refused(engine: Any) -> None:
    for wrong in ((1024,), (-1, 3)):
        with pytest.raises(EngineError, match="vocabulary"):
            engine.prefill(request(wrong))
    with pytest.raises(EngineError, match="vLLM refuses"):
        engine.admit(request(prompt(5), Sampling(max_tokens=0)), local=True)
    admission = engine.admit(request(prompt(5)), local=True)
    with pytest.raises(EngineError, match="samples the first token"):
        admission.decode([7])
    admission.close()
    assert len(compute_locally(engine, request(prompt(20)))) == 8


# Death


@own_engine
def test_when_the_engine_dies_everybody_hears_of_it(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(settings(16))
    order = request(prompt(200), Sampling(max_tokens=400, temperature=0.0))
    importing = engine.admit(order)
    running = engine.admit(request(prompt(20), Sampling(max_tokens=400, temperature=0.0)), local=True)
    steps = running.decode()
    next(steps)

    def broken() -> Any:
        raise RuntimeError("out of luck")

    decoding = Waiter(lambda: read_text(steps))
    waiting = Waiter(lambda: engine.admit(request(prompt(900)), timeout_s=PATIENCE_S))
    monkeypatch.setattr(engine._loop._engine, "step", broken)
    decoding.join()
    waiting.join()
    for error in (decoding.error, waiting.error, engine.failure):
        assert isinstance(error, EngineError)
        assert "out of luck" in str(error)
    calls: list[Callable[[], object]] = [
        lambda: importing.import_page(Page(0, PAGE_TOKENS, SHAPE.empty())),
        lambda: engine.admit(order),
        lambda: engine.prefill(order),
        engine.reset_prefix_cache,
    ]
    for call in calls:
        with pytest.raises(EngineError, match="out of luck"):
            call()
    importing.close()
    running.close()
    assert engine.stats().free_pages == 0
    assert engine.stats().running == 0


@own_engine
def test_closing_the_engine_ends_what_runs(start: Callable[..., Any]) -> None:
    engine = start(settings(16))
    running = engine.admit(request(prompt(20), Sampling(max_tokens=900, temperature=0.0)), local=True)
    decoding = Waiter(lambda: read_text(running.decode()))
    engine.close()
    engine.close()
    decoding.join()
    assert isinstance(decoding.error, EngineError)
    running.close()
    assert not any(thread.name == "vllm-engine" for thread in threading.enumerate())


def test_without_vllm_the_import_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in [name for name in sys.modules if name.startswith("pipeline.engines.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="'vllm' is not installed in this environment"):
        load("vllm", Path("nowhere"), settings(8))
