"""vLLM's own: exact equality, what is held and when it is freed, cached pages, refusals, death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.engines import load
from pipeline.engines.reference.model import Model
from pipeline.errors import ConfigError, EngineError, HandoffCancelledError
from pipeline.page import PAGE_TOKENS, Page
from pipeline.request import Sampling
from tests.engines.conftest import ARCHITECTURES, load_or_skip
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
)
from tests.engines.vllm.conftest import (
    CHUNK,
    SHAPE,
    Gate,
    SaveGate,
    arrived,
    own_engine,
    scribble,
    settings,
    shared_engine,
)

ORACLE = Path(__file__).parents[2] / "oracles" / "vllm_split.py"
SPLIT_LENGTHS = (1, 2, 51, 63, 64, 65, 66, 127, 129, 193, 321)


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


@pytest.mark.parametrize(
    ("device", "role", "eager"), [("cpu", "both", True), ("cuda", "prefill", True), ("cuda", "both", False)]
)
def test_decode_steps_of_a_gpu_are_graphs(device: str, role: str, eager: bool) -> None:
    from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode

    from pipeline.engines.vllm.engine import graphs

    fields = graphs(device, role)
    assert fields["enforce_eager"] is eager
    if not eager:
        config = CompilationConfig(**fields["compilation_config"])
        assert (config.mode, config.cudagraph_mode) == (CompilationMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)


@own_engine
def test_arguments_that_vllm_lacks_or_that_are_ours_are_refused(start: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="this vLLM has no argument 'max_model_length'"):
        start(settings(8, arguments={"max_model_length": 5}))
    with pytest.raises(ConfigError, match="'block_size' is set by Crossfill"):
        start(settings(8, arguments={"block_size": 16}))
