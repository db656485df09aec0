"""Steps that go together, and when."""

from __future__ import annotations

import threading

from pipeline.engines.base import TokenStep
from pipeline.engines.pace import await_tick, merged, next_tick
from pipeline.logprob import TokenLogprob


def test_steps_of_a_sample_are_joined_and_samples_stay_apart() -> None:
    steps = [
        TokenStep((1,), None, 0),
        TokenStep((7,), None, 1),
        TokenStep((2,), None, 0),
        TokenStep((8,), "stop", 1),
        TokenStep((3,), "length", 0),
    ]
    assert merged(steps) == [TokenStep((1, 2, 3), "length", 0), TokenStep((7, 8), "stop", 1)]
    assert merged([]) == []


def test_logprobs_stand_beside_their_tokens() -> None:
    first, second = TokenLogprob(1, -0.5), TokenLogprob(2, -0.25)
    joined = merged([TokenStep((1,), None, 0, (first,)), TokenStep((2,), None, 0, (second,))])
    assert joined == [TokenStep((1, 2), None, 0, (first, second))]
    assert merged([TokenStep((1,)), TokenStep((2,))]) == [TokenStep((1, 2))]


def test_ticks_are_shared_and_come_further_apart_with_more_requests() -> None:
    assert next_tick(1, 10.0001) == next_tick(1, 10.0019)
    ticks = {running: round(next_tick(running, 10.0005), 6) for running in (0, 1, 8, 16, 1000)}
    assert ticks == {0: 10.002, 1: 10.002, 8: 10.016, 16: 10.016, 1000: 10.04}
    assert round(next_tick(16, 10.0161) - next_tick(16, 10.0005), 6) == 0.032


def test_nobody_waits_for_a_tick_with_a_last_step_at_hand() -> None:
    last = threading.Event()
    last.set()
    await_tick(next_tick(1, 1e12), last)  # else it would not come back
    await_tick(0.0, threading.Event())
