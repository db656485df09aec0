"""Depth: vLLM and MLX in both roles on the tiny model, hurt in the middle of a handoff. `make faults` runs it. Pages to
MLX cross a page server of its own, pages to vLLM the control broker.

Every text is the engines' own: answers whose every token leads by more than KV of two engines can part. After each case
all gauges are zero, all pools whole, and the next answer is right (`Rig.rest`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.call import Call, Outcome
from tests.faults.rig import Question, Rig, rig
from tests.proxy import Faults
from tests.scenarios.conftest import required
from tests.scenarios.system import eventually

if os.environ.get("CROSSFILL_FAULTS") != "real":
    pytest.skip("`make faults` hurts real engines", allow_module_level=True)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
ENGINES = {"p-vllm": "vllm", "p-mlx": "mlx", "d-vllm": "vllm", "d-mlx": "mlx"}
ROUTES = ("vllm->mlx", "mlx->vllm")
PAGES = "beside-d-mlx"
MARGIN = 0.05  # logits; tests/engines/flow.py says why
LONG, TOKENS = 500, 12  # eight pages; a pool holds 24
POOL_BYTES = 24 * 2 * 2 * 2 * 64 * 32 * 2  # pages of layers, K and V, heads, tokens, head_dim, FP16


@pytest.fixture(scope="module")
def real(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    for engine in set(ENGINES.values()):
        required(engine)
    folder = tmp_path_factory.mktemp("real")
    with rig(tiny_model, folder, ENGINES, pool_bytes=POOL_BYTES, margin=MARGIN, own_pages=["d-mlx"]) as running:
        running.route = ROUTES[0]
        yield running


@pytest.fixture
def hurt(real: Rig) -> Iterator[Rig]:
    yield real
    real.rest()


def _begin(
    rig: Rig, route: str, *, slow: str, length: int = LONG, latency_s: float = 0.05
) -> tuple[Question, Call, str]:
    """A handoff under way whose P or D is slow, and its id."""
    rig.slow(slow, latency_s)
    question = rig.oracle.question(length, TOKENS)
    call = rig.ask(question, TOKENS, route=route)
    return question, call, rig.handoff()


def _end_engine(rig: Rig, route: str, role: str) -> tuple[Question, Call, str]:
    """A handoff whose pages move when only the engine of its P or D ends, and the name of that worker."""
    question, call, handoff = _begin(rig, route, slow="prefill")
    rig.await_record(handoff, lambda found: found.get("state") == "streaming")
    name = rig.worker_of(handoff, role)
    os.kill(rig.crew.child(name).pid, signal.SIGUSR1)
    return question, call, name


def _gone(rig: Rig, name: str) -> None:
    """The process of a worker has ended by itself, and says that something was wrong."""
    assert rig.crew.child(name).join(60)
    assert rig.crew.child(name).status == 1


def _right(question: Question, outcome: Outcome) -> None:
    assert (outcome.code, outcome.finish, outcome.text) == (None, "length", question.text(TOKENS)), outcome


def _load(rig: Rig, name: str) -> dict[str, int]:
    return dict(next(r["load"] for r in rig.status()["replicas"] if r["name"] == name))


def _attempts(outcome: Outcome, role: str) -> int:
    assert outcome.trace
    return int(outcome.trace["attempts"][role])


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_goes_wrong(hurt: Rig, route: str) -> None:
    question = hurt.oracle.question(LONG, TOKENS)
    outcome = hurt.ask(question, TOKENS, route=route).result()
    _right(question, outcome)
    assert (_attempts(outcome, "prefill"), _attempts(outcome, "decode")) == (1, 1)


@pytest.mark.parametrize("route", ROUTES)
def test_more_prompts_than_the_pools_hold(hurt: Rig, route: str) -> None:
    """Eight of eight pages and an answer each: pools of 24 pages make them wait, or preempt them."""
    questions = [hurt.oracle.question(LONG, TOKENS, number) for number in range(8)]
    calls = [hurt.ask(question, TOKENS, route=route) for question in questions]
    for question, call in zip(questions, calls, strict=True):
        _right(question, call.result())


@pytest.mark.parametrize("route", ROUTES)
def test_half_of_the_clients_leave(hurt: Rig, route: str) -> None:
    question = hurt.oracle.question(LONG, TOKENS)
    calls = [hurt.ask(question, TOKENS, route=route, stream=bool(at % 4 < 2)) for at in range(12)]
    for call in calls[::2]:
        call.leave()
    for call in calls[1::2]:
        _right(question, call.result())


@pytest.mark.parametrize("route", ROUTES)
def test_the_client_leaves_in_the_middle_of_a_copy(hurt: Rig, route: str) -> None:
    _, call, handoff = _begin(hurt, route, slow="decode", latency_s=0.02)
    hurt.await_record(handoff, lambda found: found.get("state") == "streaming")
    call.leave()
    assert not call.result().ended


@pytest.mark.parametrize("route", ROUTES)
def test_the_client_leaves_while_p_is_stopped(hurt: Rig, route: str) -> None:
    _, call, handoff = _begin(hurt, route, slow="prefill")
    hurt.await_record(handoff, lambda found: found.get("state") == "streaming")
    zombie = hurt.worker_of(handoff, "prefill")
    hurt.pause(zombie)
    call.leave()
    call.result()
    eventually(lambda: not hurt.live(), 60)
    hurt.resume(zombie)


@pytest.mark.parametrize("route", ROUTES)
def test_connections_of_p_break_within_every_page(hurt: Rig, route: str) -> None:
    hops = [hurt.hops[name] for name in ("p-vllm", "p-mlx", PAGES)]
    for hop in hops:
        hop.apply(Faults(limit_bytes=50_000))
    question = hurt.oracle.question(LONG, TOKENS)
    _right(question, hurt.ask(question, TOKENS, route=route).result())
    assert sum(hop.resets for hop in hops) > 0


@pytest.mark.parametrize("route", ROUTES)
def test_the_link_of_pages_stalls_within_one_and_comes_back(hurt: Rig, route: str) -> None:
    question, call = _stall(hurt, route)
    for hop in hurt.hops.values():
        hop.mend()
    outcome = call.result()
    _right(question, outcome)
    assert outcome.trace
    assert (outcome.trace["recomputed"], outcome.trace["imported_tokens"]) == (None, LONG - 1)


def test_the_link_to_the_page_server_stalls_and_never_comes_back(hurt: Rig) -> None:
    """D finds out within its deadlines and computes the prompt itself; it serves again when the link does."""
    question, call = _stall(hurt, ROUTES[0])
    hurt.hops[PAGES].apply(Faults(black_hole=True))
    outcome = call.result()
    _right(question, outcome)
    assert outcome.trace
    assert outcome.trace["recomputed"] in ("page_server_unavailable", "peer_error", "deadline_exceeded")
    eventually(lambda: _load(hurt, "d-mlx").get("page_server_down") == 1, 60)
    hurt.hops[PAGES].mend()
    eventually(lambda: not _load(hurt, "d-mlx").get("page_server_down"), 60)


def test_the_page_server_is_killed_in_the_middle_of_pages(hurt: Rig) -> None:
    question, call, handoff = _begin(hurt, ROUTES[0], slow="prefill")
    hurt.await_record(handoff, lambda found: found.get("state") == "streaming")
    hurt.kill(PAGES)
    outcome = call.result()
    _right(question, outcome)
    assert outcome.trace
    assert outcome.trace["recomputed"] == "page_server_unavailable"


def _stall(rig: Rig, route: str) -> tuple[Question, Call]:
    """A handoff whose pages stand still, in the middle of the second one, wherever they cross."""
    hops = [rig.hops[name] for name in ("p-vllm", "p-mlx", PAGES)]
    for hop in hops:
        hop.apply(Faults(stall_bytes=50_000))
    question = rig.oracle.question(LONG, TOKENS)
    call = rig.ask(question, TOKENS, route=route)
    eventually(lambda: any(hop.stalled.is_set() for hop in hops), 60)
    return question, call


@pytest.mark.parametrize("route", ROUTES)
def test_p_stops_in_the_middle_of_its_pages_and_wakes(hurt: Rig, route: str) -> None:
    question, call, handoff = _begin(hurt, route, slow="prefill")
    hurt.await_record(handoff, lambda found: found.get("state") == "streaming")
    zombie = hurt.worker_of(handoff, "prefill")
    hurt.pause(zombie)
    outcome = call.result()
    hurt.resume(zombie)
    _right(question, outcome)


@pytest.mark.parametrize("route", ROUTES)
def test_d_stops_in_the_middle_of_its_text_and_wakes(hurt: Rig, route: str) -> None:
    question, call, handoff = _begin(hurt, route, slow="decode", latency_s=0.1)
    call.await_text(2)
    zombie = hurt.worker_of(handoff, "decode")
    hurt.pause(zombie)
    outcome = call.result()
    hurt.resume(zombie)
    _right(question, outcome)
    assert _attempts(outcome, "decode") == 2


@pytest.mark.parametrize("route", ROUTES)
def test_only_ds_engine_ends_and_its_process_lives(hurt: Rig, route: str) -> None:
    question, call, name = _end_engine(hurt, route, "decode")
    outcome = call.result()
    _right(question, outcome)
    assert _attempts(outcome, "decode") == 2
    assert outcome.trace
    assert outcome.trace["lost_workers"] == 1
    _gone(hurt, name)


@pytest.mark.parametrize("route", ROUTES)
def test_d_is_killed_in_the_middle_of_its_text(hurt: Rig, route: str) -> None:
    """The other engine goes on from the last token."""
    question, call, handoff = _begin(hurt, route, slow="decode", latency_s=0.1)
    call.await_text(2)
    hurt.kill(hurt.worker_of(handoff, "decode"))
    outcome = call.result()
    _right(question, outcome)
    assert _attempts(outcome, "decode") == 2


@pytest.mark.parametrize("route", ROUTES)
def test_only_ps_engine_ends_and_its_process_lives(hurt: Rig, route: str) -> None:
    question, call, name = _end_engine(hurt, route, "prefill")
    _right(question, hurt.ask(question, TOKENS, route=route).result())  # the next step of an engine that idles
    _right(question, call.result())
    _gone(hurt, name)


@pytest.mark.parametrize("route", ROUTES)
def test_d_is_killed_before_its_first_token(hurt: Rig, route: str) -> None:
    question, call, handoff = _begin(hurt, route, slow="prefill")
    hurt.await_record(handoff, lambda found: found.get("state") == "streaming")
    hurt.kill(hurt.worker_of(handoff, "decode"))
    outcome = call.result()
    _right(question, outcome)
    assert _attempts(outcome, "decode") == 2


@pytest.mark.parametrize("route", ROUTES)
def test_p_is_killed_in_the_middle_of_its_pages(hurt: Rig, route: str) -> None:
    question, call, handoff = _begin(hurt, route, slow="prefill")
    hurt.await_record(handoff, lambda found: found.get("state") == "streaming")
    hurt.kill(hurt.worker_of(handoff, "prefill"))
    outcome = call.result()
    _right(question, outcome)
    assert outcome.trace
    assert outcome.trace["recomputed"] or _attempts(outcome, "prefill") > 1


def test_d_is_told_to_stop_in_the_middle_of_its_text(hurt: Rig) -> None:
    question, call, handoff = _begin(hurt, ROUTES[0], slow="decode", latency_s=0.1)
    call.await_text(2)
    name = hurt.worker_of(handoff, "decode")
    hurt.crew.child(name).terminate()
    _right(question, call.result())
    assert hurt.crew.child(name).join(60)
    assert hurt.crew.child(name).status == 0
