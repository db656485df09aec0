"""D: clients go away at every stage, one by one and in a storm; whoever stays gets the right text."""

from __future__ import annotations

import random

import pytest

from tests.faults.rig import Rig

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
ROUTE = "reference->reference"
STAGES = {
    "queued": lambda found: found.get("state") == "created",
    "p or d has begun": lambda found: found.get("state") == "admitted",
    "accepted": lambda found: found.get("state") == "accepted",
    "importing": lambda found: found.get("state") == "streaming",
    "before the first token": lambda found: found.get("state") == "committed",
    "streaming": lambda found: found.get("state") == "decoding",
    "at the last token": lambda found: found.get("tokens") == "11",
}


@pytest.mark.parametrize(("stage", "stream"), [(stage, bool(at % 2)) for at, stage in enumerate(STAGES)])
def test_d43_the_client_leaves(hurt: Rig, stage: str, stream: bool) -> None:
    """At rest again is what `hurt` checks: blocks, credit, keys, jobs, and the next answer."""
    hurt.slow("prefill", 0.02)
    hurt.slow("decode", 0.04)
    question = hurt.oracle.question(300, 12)
    call = hurt.ask(question, 12, stream=stream, route=ROUTE)
    handoff = hurt.handoff()
    # a stage may have passed before we looked: then the client leaves later, which must be just as harmless
    hurt.await_record(handoff, lambda found: not found or STAGES[stage](found) or found["state"] == "finished")
    call.leave()
    outcome = call.result()
    assert question.text(12).startswith(outcome.text.rstrip("\ufffd"))


def test_d51_a_storm_of_cancels_beside_those_who_stay(hurt: Rig) -> None:
    rng = random.Random(51)
    question = hurt.oracle.question(200, 8)
    leaving = [hurt.ask(question, 8, stream=bool(index % 2), route=ROUTE) for index in range(40)]
    staying = [hurt.ask(question, 8, stream=bool(index % 2), route=ROUTE) for index in range(8)]
    rng.shuffle(leaving)
    for call in leaving:
        call.leave()
    for call in staying:
        outcome = call.result()
        assert (outcome.status, outcome.code, outcome.text) == (200, None, question.text(8)), outcome
