"""A bench that is stopped leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.shaped import needs_link

ROOT = Path(__file__).parents[2]
WAITS = """
import sys, time
from pathlib import Path
from bench import ending
with ending.orderly():
    try:
        print("there", flush=True)
        time.sleep(600)
    finally:
        print("leaving", flush=True)
        sys.stdin.readline()
        Path(sys.argv[1]).touch()
"""
LINKED = """
import subprocess, sys
from bench import ending, link
from bench.pair import Pair
with ending.orderly(), link.shaped(85e6) as made, Pair(made.enter) as pair:
    print(made.namespace, f"bn{made.number}", *[side.pid for side, _ in pair._sides], flush=True)
    sys.stdin.readline()
"""


def _start(program: str, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_blocks_are_left_once_and_a_second_signal_does_not_disturb(tmp_path: Path, number: signal.Signals) -> None:
    with _start(WAITS, str(tmp_path / "left")) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(number)
        assert process.stdout.readline() == "leaving\n"
        process.send_signal(number)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 128 + number
    assert (tmp_path / "left").exists()


@needs_link
def test_a_killed_bench_leaves_no_namespace_device_or_process() -> None:
    with _start(LINKED) as process:
        assert process.stdout is not None
        namespace, device, *pids = process.stdout.readline().split()
        assert Path("/run/netns", namespace).exists()
        assert Path("/sys/class/net", device).exists()
        assert len(pids) == 2
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not Path("/run/netns", namespace).exists()
    assert not Path("/sys/class/net", device).exists()
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
