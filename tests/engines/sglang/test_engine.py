"""What is special about SGLang: its two roles, what a decode engine of this kind holds, and a scheduler that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines import load
from pipeline.engines.reference import ReferenceEngine
from pipeline.engines.reference.model import Model
from pipeline.errors import ConfigError, EngineError
from pipeline.request import Request, Sampling
from pipeline.settings import EngineSettings
from tests.engines.conftest import suite_settings
from tests.engines.flow import PATIENCE_S, Oracle, Waiter, deliver, eventually, export, prompt, request
from tests.engines.sglang.conftest import own_engine

Start = Callable[..., Any]


def whole(token_ids: tuple[int, ...]) -> Request:
    return replace(request(token_ids), first_token=True)


def test_one_role_per_process(checkpoints: dict[str, Path]) -> None:
    pytest.importorskip("sglang", reason="SGLang is not in this environment")
    with pytest.raises(ConfigError, match="two workers"):
        load("sglang", checkpoints["qwen3"], EngineSettings())


@own_engine
def test_as_d_it_moves_only_what_it_lacks(start: Start, checkpoints: dict[str, Path]) -> None:
    """Of 744 tokens 704 are held, of 128 all: no page then, but the first token and the commit."""
    engine, twin = start("decode"), ReferenceEngine(checkpoints["qwen3"], suite_settings(checkpoints["qwen3"]))
    oracle = Oracle(Model.load(checkpoints["qwen3"]))
    try:
        for tokens, held_then, moved in ((744, 11, 1), (128, 2, 0), (64, 1, 0), (63, 0, 1), (1, 0, 1)):
            ids = oracle.sure_prompt(tokens)
            order = whole(ids)
            pages = export(twin, order)
            for expected in (0, held_then):
                text, held, finish = deliver(engine, order, pages)
                assert (text, held, finish) == (list(oracle.text(ids).tokens), expected, "length")
            assert len(pages) - held_then == moved
        assert engine.capabilities.needs_first_token
        assert not engine.capabilities.can_prefill
        _refusals(engine)
        _stop_on_the_first_token(engine, twin, oracle)
        assert eventually(lambda: engine.stats().running == 0)
    finally:
        twin.close()


def _refusals(engine: Any) -> None:
    for kind in ({"local": True}, {}):  # as if it could compute prompts: at once, not after a wait
        with pytest.raises(EngineError, match="computes no prompts"):
            engine.admit(request(prompt(10)), timeout_s=PATIENCE_S, **kind)
    with pytest.raises(EngineError, match="started for decode"):
        engine.prefill(request(prompt(10)))
    endless = replace(whole(prompt(3585)), sampling=Sampling(max_tokens=8000, temperature=0.0))
    with pytest.raises(EngineError, match="need 7681 tokens of KV and kv_cache_bytes allows 7680"):
        engine.admit(endless, timeout_s=PATIENCE_S)
    admission = engine.admit(whole(prompt(10)))
    with pytest.raises(EngineError, match="0 came"):
        admission.decode()
    admission.close()


def _stop_on_the_first_token(engine: Any, twin: Any, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(70)
    first = oracle.text(ids).tokens[0]
    order = replace(whole(ids), sampling=Sampling(max_tokens=50, temperature=0.0, stop_token_ids=(first,)))
    assert deliver(engine, order, export(twin, order))[::2] == ([first], "stop")


@own_engine
def test_a_scheduler_that_dies_fails_every_request_at_once(start: Start) -> None:
    engine = start("prefill")
    with pytest.raises(EngineError, match="started for prefill"):
        engine.admit(whole(prompt(10)), timeout_s=PATIENCE_S)
    pages = export(engine, whole(prompt(300)))
    assert [page.tokens for page in pages] == [64, 64, 64, 64, 44]
    assert engine.failure is None

    running = engine.prefill(request(prompt(5000)))
    assert running.wait_ready(0, PATIENCE_S)
    held_back = engine.prefill(request(prompt(100, 1)))  # by the quota: SGLang has never seen it
    waiters = [Waiter(lambda: running.read(77)), Waiter(lambda: held_back.wait_ready(0, PATIENCE_S))]
    os.kill(_scheduler(), signal.SIGKILL)
    for waiter in waiters:
        waiter.join()
        assert isinstance(waiter.error, EngineError)
    running.close()
    held_back.close()
    failure: Any = engine.failure
    assert isinstance(failure, EngineError)
    with pytest.raises(EngineError, match="has ended"):
        engine.prefill(request(prompt(10)))
    assert (engine.stats().running, engine.stats().free_pages) == (0, 0)


def _scheduler() -> int:
    """The process id of SGLang's scheduler, a child of ours."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    for child in {int(one) for listed in children for one in listed.read_text().split()}:
        if b"scheduler" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise AssertionError("SGLang has no scheduler process")
