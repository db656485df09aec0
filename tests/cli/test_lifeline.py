"""A child dies with its parent, however the parent ends. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

CHILD = """
import os, sys, time
sys.platform = {platform!r}
from pipeline.cli import lifeline
lifeline.hold({parent})
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
code = sys.argv[1].replace("PARENT", str(os.getpid()))
subprocess.Popen([sys.executable, "-c", code])
time.sleep(600)
"""


def _code(platform: str, parent: int | str) -> str:
    return CHILD.format(platform=platform, parent=parent)


@pytest.mark.parametrize(
    "platform",
    [pytest.param("linux", marks=pytest.mark.skipif(sys.platform != "linux", reason="a Linux system call")), "darwin"],
)
def test_a_killed_parent_takes_its_child_along(platform: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, _code(platform, "PARENT")], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent, parent.stdout as output:
        child = int(output.readline())
        os.kill(child, 0)
        parent.kill()
        assert output.read() == b""  # the pipe ends when its last holder, the child, is gone


@pytest.mark.parametrize("platform", ["darwin"])
def test_a_child_whose_parent_is_gone_ends_at_once(platform: str) -> None:
    done = subprocess.run([sys.executable, "-c", _code(platform, 1 << 22)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""
