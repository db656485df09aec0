"""The shaped link: it can be crossed, both its ends are shaped, and nothing of it is left."""

from __future__ import annotations

import subprocess
import sys

from bench import link, stream
from bench.pair import Pair
from bench.stream import Task
from tests.bench.shaped import needs_link

pytestmark = needs_link


def _out(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_transfer_crosses_it_and_both_ends_are_shaped() -> None:
    with link.shaped(85e6) as made, Pair(made.enter) as pair:
        task = Task("", 2, 0, "f" * 32, link=made)
        measured = pair.measure(stream.TCP, stream.TRANSPORTS[stream.TCP], task)
        assert measured.wire_bytes == 2 * stream.SHAPE.page_bytes
        far = _out(*made.command, "tc", "qdisc", "show")
        near = next(line for line in _out("tc", "qdisc", "show").splitlines() if f"bn{made.number}" in line)
        assert "tbf" in near
        assert "rate 680Mbit" in near
        assert "rate 680Mbit" in far
    assert made.namespace not in _out("ip", "netns", "list")


def test_links_of_one_process_have_addresses_of_their_own() -> None:
    with link.shaped(85e6, 0) as one, link.shaped(125e6, 1) as other:
        assert len({one.near, one.far, other.near, other.far}) == 4


def test_a_command_of_the_far_host_sees_only_its_own_network() -> None:
    with link.shaped(85e6) as made:
        lines = _out(
            *made.command, sys.executable, "-c", "import socket; print(*[n for _, n in socket.if_nameindex()])"
        )
    assert sorted(lines.split()) == sorted(["lo", f"bf{made.number}"])


def test_what_a_killed_bench_left_is_removed_by_the_next() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = f"{link.NAME}{ended.pid}-0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with link.shaped(85e6) as made:
        names = _out("ip", "netns", "list")
    assert left not in names
    assert made.namespace in names
