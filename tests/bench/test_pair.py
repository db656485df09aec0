"""Two processes that move something from one to the other."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import pytest

from bench.pair import Pair


class Task(NamedTuple):
    total_bytes: int
    lost_bytes: int = 0


def send(task: Task, peer: Any) -> Generator[None, None, int]:
    yield
    peer.send_bytes(bytes(task.total_bytes))
    return task.total_bytes


def receive(task: Task, peer: Any) -> Generator[None, None, int]:
    yield
    return len(peer.recv_bytes()) - task.lost_bytes


def refuse(task: Task, peer: Any) -> Generator[None, None, int]:
    yield
    raise ValueError("no such thing")


def test_one_transfer_after_another_in_the_same_two_processes() -> None:
    with Pair() as pair:
        for size in (1000, 3):
            measured = pair.measure("pipe", (send, receive), Task(size))
            assert (measured.moved_bytes, measured.wire_bytes) == (size, size)
            assert measured.wall_s > 0


def test_bytes_that_got_lost_are_an_error() -> None:
    with Pair() as pair, pytest.raises(RuntimeError, match="pipe: 10 bytes sent, 8 received"):
        pair.measure("pipe", (send, receive), Task(10, lost_bytes=2))


def test_a_side_that_fails_is_named_though_the_other_waits_for_it() -> None:
    with Pair() as pair, pytest.raises(RuntimeError, match="pipe: one side failed: ValueError: no such thing"):
        pair.measure("pipe", (refuse, receive), Task(10))
