"""What the kernel tells of processes, and where they are put."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from bench import cores, process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
child.communicate(b"\\n")
"""


@pytest.fixture
def parent() -> Iterator[tuple[int, int]]:
    """A process and the one it has started."""
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        yield started.pid, int(started.stdout.readline())
        started.communicate(b"\n")


def test_processes_below_another(parent: tuple[int, int]) -> None:
    first, second = parent
    assert process.below(first) == {second}
    assert {first, second} <= process.below(os.getpid())


def test_cpu_only_grows_and_counts_what_is_used() -> None:
    before, own = process.cpu_s(os.getpid()), os.times()
    while sum(os.times()[:2]) - sum(own[:2]) < 0.1:
        pass
    assert process.cpu_s(os.getpid()) - before >= 0.07  # in ticks of 10 ms


def test_the_most_that_was_resident_stays_when_it_is_given_back() -> None:
    pid, size = os.getpid(), 64 << 20
    block = bytearray(b"x") * size
    most = process.status_bytes(pid, "VmHWM")
    assert most >= size
    del block
    assert process.status_bytes(pid, "VmRSS") < most - size // 2
    slack = 1 << 20  # the kernel adds up each core's share late
    assert process.status_bytes(pid, "VmHWM") >= most - slack
    assert process.reset_peak(pid) < most - size // 2
    assert process.status_bytes(pid, "VmHWM") < most - size // 2
    with pytest.raises(KeyError):
        process.status_bytes(pid, "VmNothing")


def test_every_thread_is_put_there() -> None:
    over, started, names = threading.Event(), threading.Event(), list[int]()

    def wait() -> None:
        names.append(threading.get_native_id())
        started.set()
        over.wait()

    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        started.wait()
        cores.pin(os.getpid(), {min(before)})
        assert os.sched_getaffinity(names[0]) == os.sched_getaffinity(0) == {min(before)}
    finally:
        cores.pin(os.getpid(), before)
        over.set()
        thread.join()


@pytest.mark.skipif(not cores.can_part(), reason="one core")
def test_the_chosen_are_apart(parent: tuple[int, int]) -> None:
    before = os.sched_getaffinity(0)
    *rest, last = sorted(before)
    try:
        cores.part([parent[1]])
        assert os.sched_getaffinity(parent[1]) == {last}
        assert os.sched_getaffinity(parent[0]) == os.sched_getaffinity(0) == set(rest)
    finally:
        for pid in (os.getpid(), *parent):
            cores.pin(pid, before)
