"""Running several benches: what they return, and that none is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as benches

TIDY = """
import sys, time
from pathlib import Path
from bench import ending
with ending.orderly():
    try:
        print("there", flush=True)
        time.sleep(600)
    finally:
        Path(sys.argv[1]).touch()
"""
RUNS = """
import sys
from bench import __main__ as benches, ending
with ending.orderly():
    benches.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], 600)
"""


def test_a_status_is_passed_on() -> None:
    assert benches.run([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3


def test_what_takes_too_long_is_ended() -> None:
    assert benches.run([sys.executable, "-c", "import time; time.sleep(600)"], 0.1) == benches.LATE


def test_a_stopped_run_waits_for_its_bench(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", RUNS, TIDY, str(tmp_path / "put away")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "put away").exists()


def test_an_unknown_bench_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "router", "speed"])
    assert benches.main() == 2
    assert "no benchmark called speed: there is router, " in capsys.readouterr().err
