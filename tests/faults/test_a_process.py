"""A: processes die or stop, in either role, at every point of a handoff.

What came before is never repeated and never wrong. Where nobody can go on, the error says so and may be retried.
"""

from __future__ import annotations

import pytest

from tests.faults.call import Call, Outcome
from tests.faults.rig import API, Question, Rig, frame, page, script
from tests.scenarios.system import eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
LOST = {"worker_lost", "no_replica"}  # of a retryable 5xx, or of an error frame
ROUTE = "reference->reference"
LONG = 1000  # prompt tokens: sixteen pages, of which four are under way at most
TOKEN = script("emit")  # what D sends with each token
PAGES_OF_150 = 3


def _begin(rig: Rig, tokens: int, length: int = LONG) -> tuple[Question, Call]:
    question = rig.oracle.question(length, tokens)
    return question, rig.ask(question, tokens, route=ROUTE)


def _right(question: Question, tokens: int, outcome: Outcome) -> None:
    assert (outcome.code, outcome.finish) == (None, "length"), outcome
    assert outcome.text == question.text(tokens)


def _right_or_lost(question: Question, tokens: int, outcome: Outcome) -> None:
    if outcome.code is None:
        _right(question, tokens, outcome)
    else:
        assert outcome.ended
        assert outcome.code in LOST, outcome
        assert question.text(tokens).startswith(outcome.text)


def test_a01_p_dies_before_it_takes_the_job(hurt: Rig) -> None:
    hurt.pause("p-0")
    hurt.pause("p-1")
    question = hurt.oracle.question(LONG, 4)
    call = hurt.ask(question, 4, route=ROUTE)
    hurt.handoff()
    hurt.kill("p-0")
    hurt.resume("p-1")
    _right(question, 4, call.result())


def test_a02_p_dies_in_the_middle_of_its_pages(hurt: Rig) -> None:
    with hurt.holding("prefill", page(6)) as held:
        question, call = _begin(hurt, 6)
        hurt.kill(held())
    outcome = call.result()
    _right(question, 6, outcome)
    assert outcome.trace
    assert outcome.trace["recomputed"] or outcome.trace["attempts"]["prefill"] > 1


def test_a03_p_dies_between_its_last_page_and_commit(hurt: Rig) -> None:
    with hurt.holding("prefill", frame(PAGES_OF_150 + 1)) as held:  # OPEN is frame 0, then come the pages
        question, call = _begin(hurt, 6, 150)
        hurt.kill(held())
    _right(question, 6, call.result())


def test_a04_d_dies_before_it_takes_the_job(hurt: Rig) -> None:
    hurt.pause("d-0")
    hurt.pause("d-1")
    question = hurt.oracle.question(LONG, 4)
    call = hurt.ask(question, 4, route=ROUTE)
    route = hurt.await_record(hurt.handoff(), lambda found: "route" in found)["route"]
    chosen, other = ("d-0", "d-1") if '"d-0"' in route else ("d-1", "d-0")
    hurt.kill(chosen)
    hurt.resume(other)
    _right_or_lost(question, 4, call.result())


def test_a05_d_dies_in_the_middle_of_its_import(hurt: Rig) -> None:
    with hurt.holding("decode", page(6)) as held:
        question, call = _begin(hurt, 6)
        hurt.kill(held())
    _right_or_lost(question, 6, call.result())


def test_a06_d_dies_after_commit_before_its_first_token(hurt: Rig) -> None:
    with hurt.holding("decode", TOKEN) as held:
        question, call = _begin(hurt, 6, 150)
        hurt.kill(held())
    _right_or_lost(question, 6, call.result())


def test_a07_d_dies_in_the_middle_of_its_text(hurt: Rig) -> None:
    with hurt.holding("decode", TOKEN, after=12) as held:
        question, call = _begin(hurt, 40, 150)
        call.await_text(5)
        hurt.kill(held())
    outcome = call.result()
    assert len(outcome.text) >= 5
    _right_or_lost(question, 40, outcome)


def test_a09_both_die(hurt: Rig) -> None:
    with hurt.holding("prefill", page(6)) as held:
        question, call = _begin(hurt, 6)
        p = held()
        d = hurt.worker_of(hurt.handoff(), "decode")  # it has asked for pages
        for name in (p, d):
            hurt.kill(name)
    outcome = call.result()
    if outcome.code != "quarantined":  # two workers that died of one request: it is not given to a third
        _right_or_lost(question, 6, outcome)


def test_a10_the_api_dies_in_the_middle_of_a_text(hurt: Rig) -> None:
    """Its workers notice that nobody owns the handoff any more, and leave."""
    hurt.slow("decode", 0.1)
    _, call = _begin(hurt, 400, 150)
    handoff = hurt.handoff()
    call.await_text(3)
    hurt.kill(API)
    assert not call.result().ended
    eventually(lambda: not hurt.live(), 60)
    assert hurt.record(handoff) == {} or int(hurt.record(handoff)["tokens"]) < 400


def test_a12_a_worker_is_told_to_stop_and_ends_what_it_has_begun(hurt: Rig) -> None:
    with hurt.holding("decode", TOKEN, after=12) as held:
        question, call = _begin(hurt, 40, 150)
        name = held()
        hurt.crew.child(name).terminate()
    _right(question, 40, call.result())
    assert hurt.crew.child(name).join(60)
    assert hurt.crew.child(name).status == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a13_a_worker_stops_for_longer_than_its_lease_and_wakes(hurt: Rig, role: str) -> None:
    """What it still writes is of an old attempt: nobody reads it."""
    prefill = role == "prefill"
    length, tokens = (LONG, 6) if prefill else (150, 40)
    with hurt.holding(role, page(6)) if prefill else hurt.holding(role, TOKEN, after=12) as held:
        question, call = _begin(hurt, tokens, length)
        name = held()
        hurt.pause(name)
    eventually(lambda: name not in {r["name"] for r in hurt.status()["replicas"]})
    outcome = call.result()
    hurt.resume(name)
    (_right if prefill else _right_or_lost)(question, tokens, outcome)
