"""How many rounds there are."""

from __future__ import annotations

from bench import rounds


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


def _count(end_s: float, fewest: int, *lasting_s: float) -> int:
    clock, count = Clock(), 0
    for number in rounds.until(end_s, fewest, clock):
        assert number == count
        clock.time_s += lasting_s[number]
        count += 1
    return count


def test_a_round_that_would_be_late_does_not_begin() -> None:
    assert _count(130.0, 1, 10, 10, 10, 10) == 3
    assert _count(129.0, 1, 10, 10, 10, 10) == 2


def test_the_longest_round_counts() -> None:
    assert _count(130.0, 1, 16, 2, 10) == 1
    assert _count(132.0, 1, 16, 2, 10) == 2


def test_there_are_never_too_few() -> None:
    assert _count(0.0, 3, 10, 10, 10) == 3
