"""What is to be given back is given back once, whoever takes it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

from pipeline.broker.returns import Returns


def test_what_was_put_is_taken_in_order_and_once() -> None:
    returns = Returns()
    returns.put((3,))
    returns.put((5, 4))
    assert returns.take() == [3, 5, 4]
    assert returns.take() == []


def test_two_that_take_at_once_never_take_the_same() -> None:
    returns = Returns()
    with ThreadPoolExecutor(3) as pool:
        putting = pool.submit(deque, map(returns.put, ((one,) for one in range(5000))), 0)
        taking = [pool.submit(lambda: [one for _ in range(2000) for one in returns.take()]) for _ in range(2)]
        putting.result()
        taken = [one for each in taking for one in each.result()]
    assert sorted([*taken, *returns.take()]) == list(range(5000))
