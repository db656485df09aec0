"""The contract suite, second part: admission under pressure, and close in every phase of both roles."""

from __future__ import annotations

import threading

import pytest

from pipeline.engines.base import Admission, Engine, EngineStats
from pipeline.errors import DeadlineError, EngineError, HandoffCancelledError
from pipeline.page import PAGE_TOKENS
from pipeline.request import Sampling
from tests.engines.conftest import HELD_PAGES, Case
from tests.engines.flow import (
    PATIENCE_S,
    Oracle,
    Waiter,
    compute_locally,
    deliver,
    eventually,
    export,
    hand_over,
    import_missing,
    prompt,
    read_text,
    request,
    settles,
)

# Admission


def fill(engine: Engine, admitted: list[Admission]) -> None:
    """Admit until there is no room; the last attempt raises DeadlineError."""
    for seed in range(64):
        admitted.append(engine.admit(request(prompt(1025, seed), to=engine), timeout_s=0.3))


@pytest.mark.role("decode")
def test_admission_times_out_and_recovers(engine: Engine, twin: Engine, baseline: EngineStats) -> None:
    admitted: list[Admission] = []
    with pytest.raises(DeadlineError):
        fill(engine, admitted)
    assert admitted
    for admission in admitted:
        admission.close()
    assert settles(engine, baseline)
    assert len(hand_over(twin, engine, prompt(1025))) == 8


@pytest.mark.role("decode")
def test_a_waiting_admission_gets_the_room_that_another_leaves(engine: Engine) -> None:
    admitted: list[Admission] = []
    with pytest.raises(DeadlineError):
        fill(engine, admitted)
    waiting = Waiter(lambda: engine.admit(request(prompt(1025, 99), to=engine), timeout_s=PATIENCE_S).close())
    admitted.pop().close()
    waiting.join()
    for admission in admitted:
        admission.close()
    assert waiting.error is None


@pytest.mark.role("prefill", "decode")
def test_an_engine_that_works_reports_no_failure(engine: Engine) -> None:
    assert engine.failure is None


@pytest.mark.role("decode")
def test_a_waiting_admission_ends_when_its_check_raises(engine: Engine, baseline: EngineStats) -> None:
    admitted: list[Admission] = []
    with pytest.raises(DeadlineError):
        fill(engine, admitted)

    def gone() -> None:
        raise HandoffCancelledError("nobody waits for it")

    with pytest.raises(HandoffCancelledError, match="nobody waits for it"):
        engine.admit(request(prompt(1025, 99), to=engine), timeout_s=PATIENCE_S, check=gone)
    for admission in admitted:
        admission.close()
    assert settles(engine, baseline)


@pytest.mark.role("decode")
def test_a_check_that_takes_its_time_keeps_nobody_else_waiting(engine: Engine, baseline: EngineStats) -> None:
    """It asks a broker that may not answer for seconds: others end and are counted meanwhile."""
    admitted: list[Admission] = []
    with pytest.raises(DeadlineError):
        fill(engine, admitted)
    asked, answer = threading.Event(), threading.Event()

    def check() -> None:
        asked.set()
        answer.wait(PATIENCE_S)

    late = request(prompt(1025, 99), to=engine)
    waiting = Waiter(lambda: engine.admit(late, timeout_s=PATIENCE_S, check=check).close())
    assert asked.wait(PATIENCE_S)
    for meanwhile in (engine.stats, *(admission.close for admission in admitted)):
        Waiter(meanwhile).join()
    answer.set()
    waiting.join()
    assert waiting.error is None
    assert settles(engine, baseline)


@pytest.mark.role("decode")
def test_a_request_that_can_never_fit_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(EngineError, match="kv_cache_bytes"):
        engine.admit(request(prompt(7900), to=engine), timeout_s=PATIENCE_S)


@pytest.mark.role("decode")
def test_all_the_room_that_is_claimed_is_granted(engine: Engine) -> None:
    """Routing sends what fits `kv_tokens`: prompt and answer, to the last token."""
    context = engine.contract.context_length
    tokens = min(engine.capabilities.kv_tokens or context, context)
    order = request(prompt(tokens - 10), Sampling(max_tokens=10, temperature=0.0), to=engine)
    engine.admit(order, timeout_s=PATIENCE_S).close()


@pytest.mark.role("prefill")
def test_a_prompt_that_can_never_fit_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(EngineError, match="kv_cache_bytes"):
        engine.prefill(request(prompt(7900))).wait_ready(0, PATIENCE_S)


@pytest.mark.role("prefill")
def test_held_pages_hold_back_new_prompts(engine: Engine) -> None:
    first = engine.prefill(request(prompt(HELD_PAGES * PAGE_TOKENS + 1)))
    assert first.wait_ready(HELD_PAGES - 1, PATIENCE_S)
    second = engine.prefill(request(prompt(100, seed=1)))
    assert not second.wait_ready(0, 0.5), "a prompt began though the quota of held pages is used up"
    first.close()
    assert second.wait_ready(0, PATIENCE_S)
    second.close()


def test_held_pages_do_not_hold_back_decoding(engine: Engine) -> None:
    first = engine.prefill(request(prompt(HELD_PAGES * PAGE_TOKENS + 1)))
    assert first.wait_ready(HELD_PAGES - 1, PATIENCE_S)
    assert len(compute_locally(engine, request(prompt(50)))) == 8
    first.close()


# Cancel


def next_request_is_right(case: Case, engine: Engine, twin: Engine, oracle: Oracle, baseline: EngineStats) -> bool:
    """In every role that the engine has."""
    assert settles(engine, baseline)
    ids = oracle.sure_prompt(130)
    texts = []
    if case.role != "prefill":
        engine.reset_prefix_cache()
        texts.append(hand_over(twin, engine, ids))
    if case.role != "decode":
        engine.reset_prefix_cache()
        texts.append(hand_over(engine, twin, ids))
    assert settles(engine, baseline)
    return all(text == list(oracle.text(ids).tokens) for text in texts)


@pytest.mark.role("prefill")
@pytest.mark.parametrize("phase", ["at once", "mid-prefill", "pages unread", "half read"])
def test_close_of_a_prefill(
    case: Case, engine: Engine, twin: Engine, oracle: Oracle, baseline: EngineStats, phase: str
) -> None:
    running = engine.prefill(request(prompt(900)))
    if phase != "at once":
        assert running.wait_ready(0 if phase == "mid-prefill" else 14, PATIENCE_S)
    if phase == "half read":
        running.read(0)
        running.skip_to(5)
        running.read(7)
    running.close()
    running.close()
    with pytest.raises(HandoffCancelledError):
        running.wait_ready(14, PATIENCE_S)
    with pytest.raises(HandoffCancelledError):
        running.read(14)
    assert next_request_is_right(case, engine, twin, oracle, baseline)


@pytest.mark.role("decode")
@pytest.mark.parametrize("phase", ["admitted", "half imported", "imported", "decoding"])
def test_close_of_an_admission(
    case: Case, engine: Engine, twin: Engine, oracle: Oracle, baseline: EngineStats, phase: str
) -> None:
    order = request(prompt(400), Sampling(max_tokens=500, temperature=0.0), to=engine)
    pages = export(twin, order)
    admission = engine.admit(order)
    import_missing(admission, {"admitted": [], "half imported": pages[:3]}.get(phase, pages))
    if phase == "decoding":
        steps = admission.decode(pages.first_tokens)
        assert next(steps).token_ids
        admission.close()
        with pytest.raises(HandoffCancelledError):
            read_text(steps)
    admission.close()
    admission.close()
    with pytest.raises((HandoffCancelledError, EngineError)):
        admission.import_page(pages[3])
    assert next_request_is_right(case, engine, twin, oracle, baseline)


def test_close_of_a_local_request_in_its_prefill(
    case: Case, engine: Engine, twin: Engine, oracle: Oracle, baseline: EngineStats
) -> None:
    long = Sampling(max_tokens=1000, temperature=0.0)  # not over before we look, however slow we are
    admission = engine.admit(request(prompt(2000), long), local=True)
    waiter = Waiter(lambda: read_text(admission.decode()))
    assert eventually(lambda: engine.stats().prompt_tokens_computed > baseline.prompt_tokens_computed)
    admission.close()
    waiter.join()
    assert isinstance(waiter.error, HandoffCancelledError)
    assert next_request_is_right(case, engine, twin, oracle, baseline)


def test_close_wakes_a_decode_loop(engine: Engine) -> None:
    admission = engine.admit(request(prompt(50), Sampling(max_tokens=2000, temperature=0.0)), local=True)
    steps = admission.decode()
    next(steps)
    waiter = Waiter(lambda: read_text(steps))
    admission.close()
    waiter.join()
    assert isinstance(waiter.error, HandoffCancelledError)


@pytest.mark.role("prefill")
@pytest.mark.parametrize("call", ["wait_ready", "read"])
def test_close_wakes_who_waits_for_a_page(engine: Engine, call: str) -> None:
    first = engine.prefill(request(prompt(HELD_PAGES * PAGE_TOKENS + 1)))
    assert first.wait_ready(HELD_PAGES - 1, PATIENCE_S)
    second = engine.prefill(request(prompt(100, seed=1)))  # held back by the quota
    waiter = Waiter(lambda: second.read(0) if call == "read" else second.wait_ready(0, PATIENCE_S))
    second.close()
    waiter.join()
    assert isinstance(waiter.error, HandoffCancelledError)
    first.close()


@pytest.mark.role("decode")
def test_neighbours_do_not_notice_a_cancel(engine: Engine, twin: Engine, oracle: Oracle) -> None:
    ids = oracle.sure_prompt(129, 12)
    order = request(ids, Sampling(max_tokens=12, temperature=0.0), to=engine)
    pages = export(twin, order)
    leavers = [request(prompt(90, seed), Sampling(max_tokens=500, temperature=0.0), to=engine) for seed in range(3)]
    shipments = [export(twin, leaver) for leaver in leavers]
    staying = [Waiter(lambda: deliver(engine, order, pages)[0]) for _ in range(2)]
    for leaver, shipment in zip(leavers, shipments, strict=True):
        admission = engine.admit(leaver)
        import_missing(admission, shipment)
        next(iter(admission.decode(shipment.first_tokens)))
        admission.close()
    for waiter in staying:
        waiter.join()
        assert waiter.error is None
        assert waiter.value == list(oracle.text(ids, 12).tokens)
