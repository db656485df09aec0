"""Ports for tests are nobody else's."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from tests.ports import free_port


def test_no_two_callers_get_the_same_port() -> None:
    with ThreadPoolExecutor(8) as pool:
        ports = list(pool.map(lambda _: free_port(), range(200)))
    assert len(set(ports)) == 200


def test_one_that_is_taken_is_passed_over() -> None:
    first = free_port()
    with socket.socket() as taken:
        for port in range(first + 1, first + 100):  # the next turn, unless another process has it meanwhile
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            break
        assert free_port() != taken.getsockname()[1]


def test_the_kernel_gives_it_to_nobody() -> None:
    """Not for a bind to 0, and not for an outgoing connection: the first of those lies above."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert probe.getsockname()[1] > free_port()
