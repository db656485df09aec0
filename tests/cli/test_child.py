"""Child processes: logs, ends, and that none is left behind. Real processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.cli import child
from pipeline.cli.child import Child
from tests.cli.process import alive

Spawn = Callable[[str, str], Child]
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    started: list[Child] = []

    def run(name: str, code: str) -> Child:
        started.append(Child(name, [sys.executable, "-c", code], os.environ, tmp_path / f"{name}.log"))
        return started[-1]

    yield run
    for each in started:
        each.kill()
        assert each.join(60.0)


def wait_for_output(each: Child) -> None:
    while not each.tail():
        assert each.status is None, each.tail()


def test_the_end_of_the_log_and_how_it_ended(spawn: Spawn) -> None:
    each = spawn("worker", "import sys; [print(i) for i in range(50)]; sys.exit(3)")
    assert each.join(60.0)
    assert each.status == 3
    assert each.tail(lines=2) == "48\n49"
    head, *lines = each.epitaph().splitlines()
    assert head == f"worker ended with status 3; the end of {each.log}:"
    assert lines == [str(i) for i in range(30, 50)]


def test_a_signal_is_named(spawn: Spawn) -> None:
    each = spawn("worker", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert each.join(60.0)
    assert each.epitaph().startswith("worker ended with signal SIGKILL;")


def test_stop_ends_polite_ones_by_sigterm(spawn: Spawn) -> None:
    each = spawn("polite", SLEEP)
    wait_for_output(each)
    assert child.stop([each], grace_s=30.0) == []
    assert each.status == -signal.SIGTERM


def test_stop_kills_stubborn_ones_and_names_them(spawn: Spawn) -> None:
    polite, stubborn = spawn("polite", SLEEP), spawn("stubborn", STUBBORN)
    wait_for_output(polite)
    wait_for_output(stubborn)
    assert child.stop([polite, stubborn], grace_s=0.5) == [stubborn]
    assert (polite.status, stubborn.status) == (-signal.SIGTERM, -signal.SIGKILL)


def test_kill_takes_what_it_started_too(spawn: Spawn) -> None:
    started = f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
    code = f"import subprocess, sys; p = {started}; print(p.pid, flush=True); p.wait()"
    each = spawn("parent", code)
    wait_for_output(each)
    grandchild = int(each.tail().split()[0])
    os.kill(grandchild, 0)
    each.kill()
    assert each.join(60.0)
    while alive(grandchild):  # reparented: its new parent reaps it in its own time; the test's timeout bounds this
        pass
